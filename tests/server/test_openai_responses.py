"""The official client's Responses API against a live server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.checkpoints import script_ids
from tests.server.conftest import LiveServer, serving_state
from tests.server.fake_engine import FakeEngine
from tests.server.templates import CALL, PARSED, SEARCH, showing_tokenizer

TOOLS = [{"type": "function", "name": "search", "parameters": SEARCH, "strict": False}]


@pytest.fixture
def client(tmp_path: Path, engine: FakeEngine) -> Iterator[openai.OpenAI]:
    engine.tokenizer = showing_tokenizer(tmp_path)
    with (
        LiveServer(serving_state(engine, **PARSED)) as live,
        openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def test_create_retrieve_and_go_on(client: openai.OpenAI):
    first = client.responses.create(model="scripted", input="hi", instructions="be brief")
    second = client.responses.create(model="scripted", input=[{"role": "user", "content": "and?"}], previous_response_id=first.id)

    assert first.output_text == second.output_text == "Hello world"
    assert first.usage.input_tokens_details.cached_tokens == 0
    assert client.responses.retrieve(first.id).output_text == "Hello world"
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_stream_helper_puts_the_same_response_together(client: openai.OpenAI, engine: FakeEngine):
    engine.script = script_ids(f"<think>hm</think>Let me see.{CALL}")

    with client.responses.stream(model="scripted", input="hi", tools=TOOLS) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()

    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert "response.reasoning_text.delta" in kinds
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert final.output_text == "Let me see."
    assert final.output[2].arguments == '{"query": "x"}'


def test_a_tool_loop_with_items_kept_by_the_client(client: openai.OpenAI, engine: FakeEngine):
    engine.script = script_ids(f"<think>hm</think>{CALL}")
    first = client.responses.create(model="scripted", input="hi", tools=TOOLS, store=False, include=["reasoning.encrypted_content"])
    engine.script = script_ids("<think></think>15C")
    call = first.output[-1]
    items = [{"role": "user", "content": "hi"}, *first.output, {"type": "function_call_output", "call_id": call.call_id, "output": "15"}]

    second = client.responses.create(model="scripted", input=items, tools=TOOLS)

    assert second.output_text == "15C"
    assert engine.tokenizer.decode(engine.seen[-1][0]) == "[tools:search]<user>hi<assistant>(hm)search:x;<tool>15<assistant>"


def test_background_and_cancel(client: openai.OpenAI):
    started = client.responses.create(model="scripted", input="hi", background=True)

    assert started.status == "queued"
    assert client.responses.cancel(started.id).status in ("cancelled", "completed")


def test_errors_are_the_clients_exceptions(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError, match="file_search") as refused:
        client.responses.create(model="scripted", input="hi", tools=[{"type": "file_search", "vector_store_ids": ["x"]}])
    assert refused.value.param == "tools"
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="other", input="hi")
