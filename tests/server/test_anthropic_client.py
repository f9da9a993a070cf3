"""The official client of the Messages API against a live server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from tests.checkpoints import script_ids
from tests.server.conftest import LiveServer, serving_state
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import HELLO
from tests.server.templates import CALL, PARSED, SEARCH, showing_tokenizer

TOOLS: list[Any] = [{"name": "search", "description": "Search.", "input_schema": SEARCH}]


@pytest.fixture
def client(tmp_path: Path, engine: FakeEngine) -> Iterator[anthropic.Anthropic]:
    engine.tokenizer = showing_tokenizer(tmp_path)
    with (
        LiveServer(serving_state(engine, api_key=("key",), **PARSED)) as live,
        anthropic.Anthropic(base_url=live.url, api_key="key", max_retries=0) as client,
    ):
        yield client


def test_create_and_count(client: anthropic.Anthropic):
    message = client.messages.create(model="scripted", max_tokens=50, messages=HELLO, system="be brief")
    counted = client.messages.count_tokens(model="scripted", messages=HELLO, system="be brief")

    assert message.content[0].text == "Hello world"
    assert message.stop_reason == "end_turn"
    assert counted.input_tokens == message.usage.input_tokens


def test_stream_helper_puts_the_same_message_together(client: anthropic.Anthropic, engine: FakeEngine):
    engine.script = script_ids(f"<think>hm</think>Let me see.{CALL}")

    with client.messages.stream(model="scripted", max_tokens=200, messages=HELLO, tools=TOOLS) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()

    assert text == "Let me see."
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
    assert final.content[0].thinking == "hm"
    assert final.content[2].input == {"query": "x"}
    assert final.stop_reason == "tool_use"
    assert final.usage.output_tokens > 50


def test_a_tool_loop(client: anthropic.Anthropic, engine: FakeEngine):
    engine.script = script_ids(f"<think>hm</think>{CALL}")
    first = client.messages.create(model="scripted", max_tokens=200, messages=HELLO, tools=TOOLS)
    engine.script = script_ids("<think></think>15C")
    result = {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": "15"}
    messages = [*HELLO, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]

    second = client.messages.create(model="scripted", max_tokens=200, messages=messages, tools=TOOLS)

    assert second.content[-1].text == "15C"
    assert engine.tokenizer.decode(engine.seen[-1][0]) == "[tools:search]<user>hi<assistant>(hm)search:x;<tool>15<assistant>"


def test_errors_are_the_clients_exceptions(client: anthropic.Anthropic, engine: FakeEngine):
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="other", max_tokens=5, messages=HELLO)
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client.messages.create(model="scripted", max_tokens=5, messages=HELLO, extra_body={"temperature": 9})
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="wrong").messages.create(model="scripted", max_tokens=5, messages=HELLO)


def test_an_error_in_mid_stream_is_an_exception(client: anthropic.Anthropic, engine: FakeEngine):
    def die(request: Any, position: int) -> Any:
        if position == 2:
            engine.dead = "the engine process was killed"
        return asyncio.sleep(0)

    engine.on_token = die
    with pytest.raises(anthropic.APIStatusError, match="was killed"):
        list(client.messages.create(model="scripted", max_tokens=50, messages=HELLO, stream=True))
