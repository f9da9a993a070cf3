"""/v1/responses over HTTP: what is refused, what the model is shown, what is stored."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.checkpoints import script_ids
from tests.server.conftest import LiveServer, serving_state
from tests.server.fake_engine import CONTEXT, FakeEngine
from tests.server.helpers import error_of
from tests.server.templates import CALL, PARSED, SEARCH, showing_tokenizer

TOOL = {"type": "function", "name": "search", "parameters": SEARCH}


@pytest.fixture
def showing(tmp_path: Path, engine: FakeEngine) -> FakeEngine:
    engine.tokenizer = showing_tokenizer(tmp_path)
    return engine


@pytest.fixture
def prompt_of(showing: FakeEngine, make_client: Callable[..., TestClient]) -> Callable[..., str]:
    """The prompt that a request makes."""
    client = make_client(**PARSED)

    def prompt(**body: Any) -> str:
        create(client, **body)
        return showing.tokenizer.decode(showing.seen[-1][0])

    return prompt


def create(client: TestClient, **body: Any) -> dict[str, Any]:
    response = client.post("/v1/responses", json={"input": "hi", **body})
    assert response.status_code == 200, response.text
    return response.json()


def refused(client: TestClient, **body: Any) -> dict[str, Any]:
    response = client.post("/v1/responses", json={"input": "hi", **body})
    assert response.status_code == 400, response.text
    return error_of(response)


def events_of(text: str) -> list[dict[str, Any]]:
    assert text.endswith("\n\n")
    found = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def stream(client: TestClient, **body: Any) -> list[dict[str, Any]]:
    response = client.post("/v1/responses", json={"input": "hi", "stream": True, **body})
    assert response.status_code == 200, response.text
    events = events_of(response.text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def test_an_answer_is_one_message(client: TestClient):
    body = create(client, metadata={"a": "b"}, max_output_tokens=50)

    assert body["status"] == "completed"
    assert body["id"].startswith("resp_")
    (item,) = body["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [{"type": "output_text", "text": "Hello world", "annotations": [], "logprobs": []}]
    assert body["usage"]["output_tokens"] == 12
    assert body["usage"]["total_tokens"] == body["usage"]["input_tokens"] + 12
    assert (body["metadata"], body["max_output_tokens"]) == ({"a": "b"}, 50)


def test_usage_has_its_details(showing: FakeEngine, make_client: Callable[..., TestClient]):
    showing.script, showing.cached_tokens = script_ids("<think>ab</think>c"), 16

    usage = create(make_client(**PARSED), input="long enough to be cached")["usage"]

    assert usage["input_tokens_details"] == {"cached_tokens": 16, "cache_write_tokens": 0}
    assert len("ab</think>") <= usage["output_tokens_details"]["reasoning_tokens"] <= len("<think>ab</think>")


def test_events_come_in_order(client: TestClient):
    events = stream(client)

    kinds = [event["type"] for event in events]
    assert kinds[:4] == ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
    assert kinds[4:-4] == ["response.output_text.delta"] * len("Hello world")
    assert kinds[-4:] == ["response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed"]
    assert "".join(event["delta"] for event in events[4:-4]) == "Hello world" == events[-4]["text"]
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == []
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "Hello world"


def test_an_answer_of_every_kind_streams_as_it_is_whole(showing: FakeEngine, make_client: Callable[..., TestClient]):
    client = make_client(**PARSED)
    showing.script = script_ids(f"<think>hm</think>Let me see.{CALL}{CALL}")

    whole = create(client, tools=[TOOL])
    events = stream(client, tools=[TOOL])

    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call", "function_call"]
    reasoning, message, first, second = whole["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert message["content"][0]["text"] == "Let me see."
    assert json.loads(first["arguments"]) == {"query": "x"} == json.loads(second["arguments"])
    assert first["call_id"] != second["call_id"]

    def bare(response: dict[str, Any]) -> list[dict[str, Any]]:
        return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in response["output"]]

    assert bare(events[-1]["response"]) == bare(whole)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    for index, item in enumerate(done):
        deltas = [event for event in events if event["type"].endswith(".delta") and event["output_index"] == index]
        assert {event["item_id"] for event in deltas} == {item["id"]}
        said = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert "".join(event["delta"] for event in deltas) == said


def test_an_answer_that_is_cut_is_incomplete(client: TestClient):
    body = create(client, max_output_tokens=3)
    events = stream(client, max_output_tokens=3)

    for response in (body, events[-1]["response"]):
        assert response["status"] == "incomplete"
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert response["output"][0]["status"] == "incomplete"
    assert events[-1]["type"] == "response.incomplete"


def test_nothing_said_is_an_empty_message(client: TestClient, engine: FakeEngine):
    engine.script = []

    assert create(client)["output"][0]["content"][0]["text"] == ""
    assert stream(client)[-1]["response"]["output"][0]["content"][0]["text"] == ""


def test_logprobs_of_the_text(client: TestClient):
    logprobs = create(client, include=["message.output_text.logprobs"], top_logprobs=2)["output"][0]["content"][0]["logprobs"]
    events = stream(client, include=["message.output_text.logprobs"], top_logprobs=2)

    assert [entry["token"] for entry in logprobs[:5]] == list("Hello")
    assert len(logprobs[0]["top_logprobs"]) == 2
    streamed = [entry for event in events if event["type"] == "response.output_text.delta" for entry in event["logprobs"]]
    assert streamed == logprobs


def test_items_become_the_messages_that_they_came_from(prompt_of: Callable[..., str]):
    items = [
        {"role": "developer", "content": "be kind"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b", "annotations": []}], "id": "m"},
        {"type": "function_call", "call_id": "c1", "name": "search", "arguments": '{"query": "x"}'},
        {"type": "function_call", "call_id": "c2", "name": "search", "arguments": '{"query": "y"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "15C"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "16C"}]},
    ]

    prompt = prompt_of(input=items, instructions="be brief", tools=[TOOL], reasoning={"effort": "low", "summary": "auto"})

    assert prompt == (
        "[tools:search][effort:low]<system>be brief\n\nbe kind<user>a<assistant>(hm)bsearch:x;search:y;<tool>15C<tool>16C<assistant>"
    )


def test_sampling_fields_of_chat_pass_through(client: TestClient, engine: FakeEngine):
    create(client, top_k=5, stop=["lo"], seed=3, temperature=0.5, top_p=0.9)

    params = engine.seen[-1][1]
    assert (params.top_k, params.stop, params.seed, params.temperature, params.top_p) == (5, ["lo"], 3, 0.5, 0.9)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [3]}, "input"),
        ({"input": [{"type": "reasoning", "summary": []}], "truncation": "auto"}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": [{"role": "user", "content": None}]}, "input"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input"),
        ({"messages": []}, "messages"),
        ({"n": 2}, "n"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": CONTEXT}, "max_output_tokens"),
        ({"temperature": 9}, "temperature"),
        ({"top_k": "many"}, "top_k"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 99}, "top_logprobs"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": {"verbosity": "high"}}, "text.verbosity"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"truncation": "middle"}, "truncation"),
        ({"background": True, "stream": True}, "stream"),
        ({"background": True, "store": False}, "store"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options"),
    ],
)
def test_what_cannot_be_honoured_is_refused(client: TestClient, engine: FakeEngine, body: dict[str, Any], param: str):
    assert refused(client, **body)["param"] == param
    assert not engine.open


def test_a_conversation_goes_on_from_a_stored_response(showing: FakeEngine, make_client: Callable[..., TestClient]):
    client = make_client(**PARSED)
    showing.script = script_ids(CALL)
    first = create(client, tools=[TOOL], instructions="be brief")
    call = first["output"][0]
    showing.script = script_ids("15C")

    output = [{"type": "function_call_output", "call_id": call["call_id"], "output": "15"}]
    second = create(client, previous_response_id=first["id"], input=output)
    third = create(client, previous_response_id=second["id"], input="thanks")

    prompts = [showing.tokenizer.decode(ids) for ids, _, _ in showing.seen]
    assert prompts[1] == "<user>hi<assistant>search:x;<tool>15<assistant>"
    assert prompts[2] == "<user>hi<assistant>search:x;<tool>15<assistant>15C<user>thanks<assistant>"
    assert third["previous_response_id"] == second["id"]


def test_stored_responses_are_found_until_they_are_deleted(client: TestClient):
    kept, streamed = create(client), stream(client)[-1]["response"]

    assert client.get(f"/v1/responses/{kept['id']}").json() == kept
    assert client.get(f"/v1/responses/{streamed['id']}").json() == streamed
    assert client.delete(f"/v1/responses/{kept['id']}").json() == {"id": kept["id"], "object": "response", "deleted": True}
    for response in (client.get(f"/v1/responses/{kept['id']}"), client.delete(f"/v1/responses/{kept['id']}")):
        assert response.status_code == 404
        assert "is kept here" in error_of(response)["message"]


def test_store_false_keeps_nothing(client: TestClient):
    body = create(client, store=False)

    assert body["store"] is False
    assert client.get(f"/v1/responses/{body['id']}").status_code == 404
    assert client.post("/v1/responses", json={"input": "x", "previous_response_id": body["id"]}).status_code == 404


def test_the_oldest_responses_are_forgotten(make_client: Callable[..., TestClient]):
    client = make_client(max_stored_responses=2)
    ids = [create(client)["id"] for _ in range(3)]
    client.get(f"/v1/responses/{ids[1]}")
    ids.append(create(client)["id"])

    assert [client.get(f"/v1/responses/{one}").status_code for one in ids] == [404, 200, 404, 200]
    small = make_client(max_stored_responses_bytes=100)
    assert small.get(f"/v1/responses/{create(small)['id']}").status_code == 404


def test_a_server_without_a_store_says_so(make_client: Callable[..., TestClient]):
    client = make_client(max_stored_responses=0)

    assert create(client)["store"] is False
    for body in ({"store": True}, {"background": True}, {"previous_response_id": "resp_1"}):
        assert "--max-stored-responses" in refused(client, **body)["message"]


def test_truncation_auto_drops_the_oldest_turns(showing: FakeEngine, make_client: Callable[..., TestClient]):
    client = make_client()
    turns = [{"role": role, "content": f"{number}{'x' * 90}"} for number in range(5) for role in ("user", "assistant")]
    items = [{"role": "system", "content": "sys"}, *turns, {"role": "user", "content": "last"}]

    assert refused(client, input=items)
    create(client, input=items, truncation="auto", max_output_tokens=20)

    prompt = showing.tokenizer.decode(showing.seen[-1][0])
    assert prompt.startswith("<system>sys<user>3x")
    assert prompt.endswith("<user>last<assistant>")
    assert refused(client, input="x" * 2 * CONTEXT, truncation="auto")


def test_a_failure_in_mid_stream_is_an_event(client: TestClient, engine: FakeEngine):
    def die(request: Any, position: int) -> Any:
        if position == 2:
            engine.dead = "the engine process was killed"
        return asyncio.sleep(0)

    engine.on_token = die
    events = stream(client)

    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["status"] == "failed"
    assert events[-1]["response"]["error"] == {"code": "server_error", "message": "the engine process was killed"}
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "He"


def test_a_failure_before_the_stream_is_a_status(client: TestClient, engine: FakeEngine):
    engine.queue_full = True

    response = client.post("/v1/responses", json={"input": "hi", "stream": True})

    assert response.status_code == 503
    assert response.headers["retry-after"] == "3"


class Background:
    def __init__(self, url: str):
        import httpx

        self.http = httpx.Client(base_url=url, timeout=10)

    def start(self) -> dict[str, Any]:
        response = self.http.post("/v1/responses", json={"input": "hi", "background": True})
        assert response.status_code == 200, response.text
        return response.json()

    def get(self, response_id: str) -> dict[str, Any]:
        return self.http.get(f"/v1/responses/{response_id}").json()

    def wait(self, response_id: str) -> dict[str, Any]:
        end = time.monotonic() + 10
        while (body := self.get(response_id))["status"] in ("queued", "in_progress"):
            assert time.monotonic() < end
            time.sleep(0.01)
        return body


def test_a_response_in_the_background_is_polled(live: LiveServer):
    background = Background(live.url)
    started = background.start()

    assert started["status"] == "queued"
    done = background.wait(started["id"])
    assert (done["status"], done["background"]) == ("completed", True)
    assert done["output"][0]["content"][0]["text"] == "Hello world"
    assert background.http.post(f"/v1/responses/{started['id']}/cancel").json() == done


def test_a_response_in_the_background_can_be_cancelled(live: LiveServer, engine: FakeEngine):
    engine.on_token = lambda request, position: asyncio.sleep(3600 if position else 0)
    background = Background(live.url)
    started = background.start()
    held = background.http.post("/v1/responses", json={"input": "x", "previous_response_id": started["id"]})

    cancelled = background.http.post(f"/v1/responses/{started['id']}/cancel").json()

    assert held.status_code == 400
    assert "not finished" in held.json()["error"]["message"]
    assert cancelled["status"] == "cancelled"
    assert not engine.open
    assert background.get(started["id"]) == cancelled


def test_too_many_in_the_background_are_refused(engine: FakeEngine):
    engine.on_token = lambda request, position: asyncio.sleep(3600)
    with LiveServer(serving_state(engine, max_stored_responses=1)) as server:
        background = Background(server.url)
        started = background.start()
        second = background.http.post("/v1/responses", json={"input": "hi", "background": True})
        background.http.post(f"/v1/responses/{started['id']}/cancel")

    assert second.status_code == 503


def test_only_responses_of_the_background_are_cancelled(client: TestClient):
    response = client.post(f"/v1/responses/{create(client)['id']}/cancel")

    assert response.status_code == 400
    assert "background" in error_of(response)["message"]


def test_text_format_constrains_the_answer(client: TestClient, engine: FakeEngine):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}

    body = create(client, text={"format": {"type": "json_schema", "name": "a", "schema": schema, "strict": True}})

    assert engine.seen[-1][1].structured_outputs.json == {**schema, "additionalProperties": False}
    assert body["text"]["format"]["name"] == "a"
    assert refused(client, text={"format": {"type": "json_schema", "name": "a"}})["param"] == "text.format"
    assert refused(client, text={"format": {"type": "json_schema", "name": "a", "schema": {"type": "thing"}}})["param"] == "text.format"
