"""The official client against a live server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest

from tests.checkpoints import script_ids
from tests.server.conftest import LiveServer
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import HELLO


@pytest.fixture
def client(live: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models(client: openai.OpenAI):
    assert [model.id for model in client.models.list()] == ["scripted"]
    assert client.models.retrieve("scripted").owned_by == "jaxllm"


def test_chat(client: openai.OpenAI):
    answer = client.chat.completions.create(model="scripted", messages=HELLO, logprobs=True, top_logprobs=2, n=2, temperature=1)

    assert [choice.message.content for choice in answer.choices] == ["Hello world"] * 2
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs.content[0].top_logprobs[1].token == "I"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 24


def test_chat_stream(client: openai.OpenAI):
    stream = client.chat.completions.create(model="scripted", messages=HELLO, stream=True, stream_options={"include_usage": True})
    parts = list(stream)

    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == "Hello world"
    assert parts[-2].choices[0].finish_reason == "stop"
    assert parts[-1].usage.completion_tokens == 12


def test_chat_stream_helper(client: openai.OpenAI):
    with client.chat.completions.stream(model="scripted", messages=HELLO) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()

    assert "content.delta" in kinds
    assert final.choices[0].message.content == "Hello world"


def test_completions(client: openai.OpenAI):
    answer = client.completions.create(model="scripted", prompt=["ab", "cd"], echo=True, logprobs=1, max_tokens=3)

    assert [choice.text for choice in answer.choices] == ["abHel", "cdHel"]
    assert answer.choices[1].logprobs.tokens == ["c", "d", "H", "e", "l"]


def test_completions_stream(client: openai.OpenAI):
    parts = list(client.completions.create(model="scripted", prompt=script_ids("ab"), stream=True))

    assert "".join(part.choices[0].text for part in parts) == "Hello world"
    assert parts[-1].choices[0].finish_reason == "stop"


def test_extra_fields_of_ours(client: openai.OpenAI, engine: FakeEngine):
    client.chat.completions.create(model="scripted", messages=HELLO, extra_body={"top_k": 5, "min_p": 0.1})

    assert (engine.seen[0][1].top_k, engine.seen[0][1].min_p) == (5, 0.1)


def test_errors_are_the_clients_exceptions(client: openai.OpenAI, engine: FakeEngine):
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="other", messages=HELLO)
    assert unknown.value.param == "model"
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="scripted", messages=HELLO, temperature=9)
    engine.queue_full = True
    with pytest.raises(openai.InternalServerError) as full:
        client.chat.completions.create(model="scripted", messages=HELLO)
    assert full.value.status_code == 503


def test_a_wrong_key_is_an_authentication_error(engine: FakeEngine):
    from tests.server.conftest import serving_state

    with LiveServer(serving_state(engine, api_key=("right",))) as server:
        with (
            openai.OpenAI(base_url=server.url + "/v1", api_key="wrong", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.models.list()
        with openai.OpenAI(base_url=server.url + "/v1", api_key="right", max_retries=0) as client:
            assert client.models.list().data


def test_an_error_in_mid_stream_is_an_exception(client: openai.OpenAI, engine: FakeEngine):
    def die(request, position):
        if position == 2:
            engine.dead = "the engine process was killed"
        return asyncio.sleep(0)

    engine.on_token = die
    with pytest.raises(openai.APIError, match="was killed"):
        list(client.chat.completions.create(model="scripted", messages=HELLO, stream=True))
