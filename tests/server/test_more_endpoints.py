"""Batches of conversations, token ids in and out, and the routes for those who run a server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from tests.checkpoints import script_ids
from tests.server.conftest import LiveServer
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import HELLO, chunks, error_of, usage_of
from tests.server.served import eventually
from tests.server.templates import PARSED, SEARCH, showing_tokenizer

GENERATE = "/inference/v1/generate"
BATCH = "/v1/chat/completions/batch"


def post(client: TestClient, path: str, **body: Any) -> dict[str, Any]:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def refused(client: TestClient, path: str, **body: Any) -> dict[str, Any]:
    response = client.post(path, json=body)
    assert response.status_code == 400, response.text
    return error_of(response)


# ---------------------------------------------------------------------------------------------------------------------- batch


def test_a_batch_answers_each_conversation_in_order(client: TestClient, engine: FakeEngine):
    engine.scripts = lambda request: script_ids("A" if engine.tokenizer.decode(request.prompt_token_ids).count("b") == 0 else "BB")
    conversations = [[{"role": "user", "content": text}] for text in ("a", "bb", "a")]

    single = [post(client, "/v1/chat/completions", messages=messages) for messages in conversations]
    body = post(client, BATCH, messages=conversations)

    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert [choice["message"]["content"] for choice in body["choices"]] == ["A", "BB", "A"]
    assert body["usage"] == usage_of(*(sum(one["usage"][name] for one in single) for name in ("prompt_tokens", "completion_tokens")))


def test_a_batch_takes_the_fields_of_chat(tmp_path: Path, engine: FakeEngine, make_client: Callable[..., TestClient]):
    engine.tokenizer = showing_tokenizer(tmp_path)
    tool = {"type": "function", "function": {"name": "search", "parameters": SEARCH}}

    post(make_client(**PARSED), BATCH, messages=[HELLO, HELLO], tools=[tool], temperature=0.5, top_k=3)

    assert [(params.temperature, params.top_k) for _, params, _ in engine.seen] == [(0.5, 3)] * 2
    assert engine.tokenizer.decode(engine.seen[1][0]).startswith("[tools:search]")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": HELLO}, "messages.0"),
        ({"messages": [HELLO], "stream": True}, "stream"),
        ({"messages": [HELLO], "n": 2}, "n"),
        ({"messages": [HELLO, [{"role": "user", "content": None}]]}, "messages"),
        ({"messages": [HELLO], "temperature": 9}, "temperature"),
        ({"messages": [HELLO] * 1025}, "messages"),
    ],
)
def test_a_batch_refuses(client: TestClient, engine: FakeEngine, body: dict[str, Any], param: str):
    assert refused(client, BATCH, **body)["param"] == param
    assert not engine.seen


def test_a_batch_tells_of_each_prompt_beside_its_answer(client: TestClient):
    conversations = [[{"role": "user", "content": text}] for text in ("a", "bb")]
    asked = {"max_tokens": 2, "return_token_ids": True, "prompt_logprobs": 1}

    single = [post(client, "/v1/chat/completions", messages=messages, **asked) for messages in conversations]
    body = post(client, BATCH, messages=conversations, **asked)

    for name in ("prompt_token_ids", "prompt_logprobs"):
        assert [choice[name] for choice in body["choices"]] == [one[name] for one in single]
        assert name not in body


def test_one_failure_ends_the_batch(client: TestClient, engine: FakeEngine):
    engine.queue_full = True

    assert client.post(BATCH, json={"messages": [HELLO, HELLO]}).status_code == 503
    assert not engine.open


# ------------------------------------------------------------------------------------------------------------------- generate


def test_token_ids_in_and_out(client: TestClient, engine: FakeEngine):
    body = post(client, GENERATE, token_ids=[5, 6, 7], sampling_params={"max_tokens": 3, "logprobs": 1, "prompt_logprobs": 0})

    (choice,) = body["choices"]
    assert choice["token_ids"] == script_ids("Hel")
    assert choice["finish_reason"] == "length"
    assert "text" not in choice
    assert choice["logprobs"]["content"][0]["token"] == f"token_id:{script_ids('H')[0]}"
    assert body["prompt_logprobs"][0] is None
    assert body["usage"]["prompt_tokens"] == 3
    assert engine.seen[0][0] == [5, 6, 7]


def test_generated_ids_stream(client: TestClient):
    response = client.post(
        GENERATE, json={"token_ids": [5], "output_mode": "text", "stream": True, "stream_options": {"include_usage": True}}
    )

    *parts, last = chunks(response.text)
    assert [token for part in parts for token in part["choices"][0]["token_ids"]] == [*script_ids("Hello world"), 0]
    assert "".join(part["choices"][0]["text"] for part in parts) == "Hello world"
    assert parts[-1]["choices"][0]["finish_reason"] == "stop"
    assert last["usage"]["completion_tokens"] == 12


def test_what_is_not_said_comes_from_the_server(client: TestClient, engine: FakeEngine):
    engine.default_sampling_params = {"top_k": 7}

    post(client, GENERATE, token_ids=[5], sampling_params={"stop": ["lo"]}, priority=0, cache_salt="s")

    _, params, more = engine.seen[0]
    assert (params.top_k, params.stop, more["cache_salt"]) == (7, ["lo"], "s")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": ["a"]}, "token_ids.0"),
        ({"token_ids": [99999]}, None),
        ({"token_ids": [5], "sampling_params": {"temprature": 1}}, "sampling_params"),
        ({"token_ids": [5], "sampling_params": {"output_kind": 0}}, "sampling_params"),
        ({"token_ids": [5], "sampling_params": {"temperature": 9}}, "temperature"),
        ({"token_ids": [5], "sampling_params": {"temperature": "hot"}}, "temperature"),
        ({"token_ids": [5], "features": "x"}, "features"),
        ({"token_ids": [5], "kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
        ({"token_ids": [5], "stream_options": {}}, "stream_options"),
    ],
)
def test_generate_refuses(client: TestClient, body: dict[str, Any], param: str | None):
    assert param in (None, refused(client, GENERATE, **body)["param"])


# ------------------------------------------------------------------------------------------------------------------ operation


def test_invocations_are_chats_or_completions(client: TestClient):
    assert post(client, "/invocations", messages=HELLO)["object"] == "chat.completion"
    assert post(client, "/invocations", prompt="x")["object"] == "text_completion"
    assert client.post("/invocations", json={"messages": HELLO, "stream": True}).text.endswith("data: [DONE]\n\n")
    refused(client, "/invocations", inputs="x")


def test_adapters_are_not_implemented(client: TestClient):
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        response = client.post(path, json={"lora_name": "x", "lora_path": "y"})
        assert response.status_code == 501
        assert error_of(response)["type"] == "NotImplementedError"


def test_tokenizer_info_needs_its_flag(client: TestClient, make_client: Callable[..., TestClient], engine: FakeEngine):
    assert client.get("/tokenizer_info").status_code == 404

    info = make_client(enable_tokenizer_info_endpoint=True).get("/tokenizer_info").json()

    assert info["vocab_size"] == engine.tokenizer.vocab_size
    assert info["chat_template"] == engine.tokenizer.chat_template
    assert info["added_tokens_decoder"]["0"]["special"] is True


def test_development_routes_need_their_flag(client: TestClient, make_client: Callable[..., TestClient], engine: FakeEngine, tmp_path: Path):
    for path in ("/reset_prefix_cache", "/start_profile", "/stop_profile"):
        assert client.post(path).status_code == 404
    dev = make_client(enable_dev_endpoints=True, profile_dir=str(tmp_path))

    assert dev.post("/reset_prefix_cache").status_code == 200
    assert engine.resets == 1
    assert dev.post("/stop_profile").status_code == 409
    assert dev.post("/start_profile").json() == {"profile_dir": str(tmp_path)}
    assert engine.profile == str(tmp_path)
    assert dev.post("/start_profile").status_code == 409
    assert dev.post("/stop_profile").status_code == 200


def test_keys_guard_whatever_generates_or_changes_the_server(make_client: Callable[..., TestClient]):
    client = make_client(api_key=("right",), enable_dev_endpoints=True, enable_tokenizer_info_endpoint=True)

    for path in (GENERATE, "/invocations", "/reset_prefix_cache", "/start_profile", "/stop_profile", "/v1/responses"):
        assert client.post(path, json={}).status_code == 401, path
    assert client.get("/tokenizer_info").status_code == 401
    assert client.get("/health").status_code == 200


# ----------------------------------------------------------------------------------------------------------------- leaving early


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "hi", "stream": True}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 100, "stream": True}),
        (GENERATE, {"token_ids": [5], "stream": True}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 100}),
        (BATCH, {"messages": [HELLO, HELLO]}),
    ],
)
def test_a_client_that_leaves_ends_its_requests(live: LiveServer, engine: FakeEngine, path: str, body: dict[str, Any]):
    engine.on_token = lambda request, position: asyncio.sleep(3600 if position else 0)

    with httpx.Client(base_url=live.url, timeout=0.3) as http, pytest.raises(httpx.ReadTimeout):
        http.post(path, json=body)

    assert engine.seen
    assert eventually(lambda: not engine.open, 5)
