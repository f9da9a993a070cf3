"""/v1/messages over HTTP: what is refused, what the model is shown, what the errors look like."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from jaxllm.server.app import create_app
from tests.checkpoints import script_ids
from tests.server.conftest import serving_state
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import HELLO
from tests.server.templates import CALL, PARSED, SEARCH, showing_tokenizer

TOOL = {"name": "search", "input_schema": SEARCH}


@pytest.fixture
def showing(tmp_path: Path, engine: FakeEngine) -> FakeEngine:
    engine.tokenizer = showing_tokenizer(tmp_path)
    return engine


@pytest.fixture
def parsing(showing: FakeEngine, make_client: Callable[..., TestClient]) -> TestClient:
    return make_client(**PARSED)


def create(client: TestClient, **body: Any) -> dict[str, Any]:
    response = client.post("/v1/messages", json={"messages": HELLO, "max_tokens": 100, **body})
    assert response.status_code == 200, response.text
    return response.json()


def refused(client: TestClient, path: str = "/v1/messages", **body: Any) -> str:
    response = client.post(path, json={"messages": HELLO, "max_tokens": 100, **body})
    assert response.status_code == 400, response.text
    assert response.json()["type"] == "error"
    assert response.json()["error"]["type"] == "invalid_request_error"
    return response.json()["error"]["message"]


def stream(client: TestClient, **body: Any) -> list[dict[str, Any]]:
    response = client.post("/v1/messages", json={"messages": HELLO, "max_tokens": 100, "stream": True, **body})
    assert response.status_code == 200, response.text
    found = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def test_an_answer_is_one_text_block(client: TestClient):
    body = create(client)

    assert body["content"] == [{"type": "text", "text": "Hello world", "citations": None}]
    assert (body["type"], body["role"], body["stop_reason"], body["stop_sequence"]) == ("message", "assistant", "end_turn", None)
    assert body["usage"]["output_tokens"] == 12


def test_cached_tokens_are_counted_apart(client: TestClient, engine: FakeEngine):
    total = create(client)["usage"]["input_tokens"]
    engine.cached_tokens = 4

    usage = create(client)["usage"]

    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (total - 4, 4)


def test_events_come_in_order(client: TestClient):
    events = stream(client)

    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[3:-3] == ["content_block_delta"] * len("Hello world")
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "".join(event["delta"]["text"] for event in events[3:-3]) == "Hello world"
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 12


def test_thinking_text_and_calls_are_blocks(parsing: TestClient, showing: FakeEngine):
    showing.script = script_ids(f"<think>hm</think>Let me see.{CALL}")

    body = create(parsing, tools=[TOOL], max_tokens=200)
    events = stream(parsing, tools=[TOOL], max_tokens=200)

    thinking, text, call = body["content"]
    assert (thinking["type"], thinking["thinking"], bool(thinking["signature"])) == ("thinking", "hm", True)
    assert text["text"] == "Let me see."
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "search", {"query": "x"})
    assert body["stop_reason"] == "tool_use" == events[-2]["delta"]["stop_reason"]
    starts = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert starts == ["thinking", "text", "tool_use"]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta" and event["index"] == 2]
    assert json.loads("".join(delta["partial_json"] for delta in deltas)) == {"query": "x"}


@pytest.mark.parametrize(
    ("body", "reason", "sequence", "text"),
    [
        ({"max_tokens": 3}, "max_tokens", None, "Hel"),
        ({"stop_sequences": ["xx", "lo "]}, "stop_sequence", "lo ", "Hel"),
        ({}, "end_turn", None, "Hello world"),
    ],
)
def test_why_an_answer_ended(client: TestClient, body: dict[str, Any], reason: str, sequence: str | None, text: str):
    whole, events = create(client, **body), stream(client, **body)

    assert (whole["stop_reason"], whole["stop_sequence"], whole["content"][0]["text"]) == (reason, sequence, text)
    assert events[-2]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


def test_arguments_that_are_cut_are_kept_as_they_are(parsing: TestClient, showing: FakeEngine):
    showing.script = script_ids(CALL)

    body = create(parsing, tools=[TOOL], max_tokens=len('<tool_call>\n{"name": "search", "arguments": {"query": "'))

    assert body["stop_reason"] == "max_tokens"
    assert [set(block["input"]) for block in body["content"] if block["type"] == "tool_use"] in ([], [{"_unparsed"}], [{"query"}])


def test_blocks_become_messages(parsing: TestClient, showing: FakeEngine):
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "b"},
                {"type": "tool_use", "id": "t1", "name": "search", "input": {"query": "x"}},
                {"type": "tool_use", "id": "t2", "name": "search", "input": {"query": "y"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "15C"},
                {"type": "tool_result", "tool_use_id": "t2", "content": [{"type": "text", "text": "16C"}], "is_error": False},
                {"type": "text", "text": "go on"},
            ],
        },
    ]
    system = [{"type": "text", "text": "x-anthropic-billing-header: 1234"}, {"type": "text", "text": "be brief"}]

    create(parsing, messages=messages, system=system, tools=[TOOL], thinking={"type": "adaptive"}, output_config={"effort": "low"})

    assert showing.tokenizer.decode(showing.seen[-1][0]) == (
        "[tools:search][effort:low][think:True]<system>be brief<user>a<assistant>(hm)bsearch:x;search:y;"
        "<tool>15C<tool>16C<user>go on<assistant>"
    )


def test_what_the_system_says_between_turns_joins_them(parsing: TestClient, showing: FakeEngine):
    call = {"type": "tool_use", "id": "t1", "name": "search", "input": {"query": "x"}}
    found = [{"type": "text", "text": "15C"}, {"type": "tool_reference", "tool_name": "search"}]
    messages = [
        {"role": "system", "content": "kindly"},
        {"role": "user", "content": "a"},
        {"role": "ctx", "content": "b"},
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": found}]},
        {"role": "system", "content": "c"},
        {"role": "assistant", "content": "d"},
        {"role": "system", "content": "e"},
        {"role": "user", "content": "f"},
    ]

    create(parsing, messages=messages, system="be brief", tools=[TOOL])

    assert showing.tokenizer.decode(showing.seen[-1][0]) == (
        "[tools:search]<system>be brief\n\nkindly<user>a\n\nb<assistant>search:x;<tool>15C\nsearch\n\nc<assistant>d<user>e\n\nf<assistant>"
    )


@pytest.mark.parametrize(("options", "budget"), [({}, None), ({"reasoning_parser": "qwen3"}, 1024)])
def test_a_budget_limits_the_thinking_that_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], budget: int):
    monkeypatch.setattr("tests.server.fake_engine.CONTEXT", 4096)
    engine = FakeEngine(showing_tokenizer(tmp_path))

    create(TestClient(create_app(serving_state(engine, **options))), max_tokens=2000, thinking={"type": "enabled", "budget_tokens": 1024})

    assert engine.seen[-1][1].thinking_token_budget == budget


def test_an_answer_that_the_client_began_goes_on(parsing: TestClient, showing: FakeEngine):
    create(parsing, messages=[*HELLO, {"role": "assistant", "content": "Well, "}])

    assert showing.tokenizer.decode(showing.seen[-1][0]) == "<user>hi<assistant>Well, "


def test_tokens_are_counted_as_they_will_be_used(parsing: TestClient, showing: FakeEngine):
    more = {"system": "be brief", "tools": [TOOL], "thinking": {"type": "enabled", "budget_tokens": 2000}}
    counted = parsing.post("/v1/messages/count_tokens", json={"messages": HELLO, **more})

    more["thinking"] = {"type": "adaptive"}
    assert counted.json() == {"input_tokens": create(parsing, **more)["usage"]["input_tokens"]}
    assert parsing.post("/v1/messages/count_tokens", json={"messages": [{"role": "user", "content": "x" * 9999}]}).status_code == 200


def test_sampling_fields_of_chat_pass_through(client: TestClient, engine: FakeEngine):
    create(client, top_k=5, min_p=0.1, seed=3, temperature=0.5)

    params = engine.seen[-1][1]
    assert (params.top_k, params.min_p, params.seed, params.temperature, params.max_tokens) == (5, 0.1, 3, 0.5, 100)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "x"}]}]}, "input"),
        ({"system": 3}, "system must be"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10_000}, "max_tokens"),
        ({"stop": ["x"]}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop"),
        ({"n": 2}, "n is not offered"),
        ({"temperature": 9}, "temperature"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "x"}]}, "input_schema"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"thinking": {"type": "on"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 10}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}, "max_tokens": 2000}, "thinking.budget_tokens"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        ({"speed": "fast"}, "speed"),
        ({"output_format": {"type": "xml"}}, "output_config.format"),
    ],
)
def test_what_cannot_be_honoured_is_refused(client: TestClient, engine: FakeEngine, body: dict[str, Any], said: str):
    assert said in refused(client, **body)
    assert not engine.open


def test_context_management_that_keeps_everything_is_taken(client: TestClient):
    create(client, context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]})


def test_errors_have_anthropics_form(client: TestClient, engine: FakeEngine, make_client: Callable[..., TestClient]):
    def kind(response: Any) -> tuple[int, str]:
        body = response.json()
        assert body["type"] == "error"
        return response.status_code, body["error"]["type"]

    body = {"messages": HELLO, "max_tokens": 5}
    assert kind(client.post("/v1/messages", json={**body, "model": "other"})) == (404, "not_found_error")
    assert kind(client.post("/v1/messages", content=b"{", headers={"content-type": "application/json"})) == (400, "invalid_request_error")
    assert kind(client.get("/v1/messages")) == (405, "invalid_request_error")
    assert kind(make_client(max_request_body_size=10).post("/v1/messages", json=body)) == (413, "request_too_large")
    keyed = make_client(api_key=("right",))
    assert kind(keyed.post("/v1/messages", json=body)) == (401, "authentication_error")
    assert kind(keyed.post("/v1/messages", json=body, headers={"x-api-key": "wrong"})) == (401, "authentication_error")
    assert keyed.post("/v1/messages", json=body, headers={"x-api-key": "right"}).status_code == 200
    engine.queue_full = True
    for more in ({}, {"stream": True}):
        assert kind(client.post("/v1/messages", json={**body, **more})) == (503, "overloaded_error")


def test_output_format_constrains_the_answer(client: TestClient, engine: FakeEngine):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}

    create(client, output_config={"format": {"type": "json_schema", "schema": schema}})

    assert engine.seen[-1][1].structured_outputs.json == {**schema, "additionalProperties": False}
    assert "output_config.format" in refused(client, output_config={"format": {"type": "json_schema", "schema": {"type": "thing"}}})
