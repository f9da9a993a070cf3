"""`jaxllm serve` as users run it: command line, HTTP, engine process and compiled steps, over a model that says what it is told."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from tests.checkpoints import script_ids, write_scripted_model
from tests.server.helpers import HELLO, choices, chunks, error_of, usage_of
from tests.server.served import Served, eventually

pytestmark = pytest.mark.heavy

CONTEXT = 1024
# The token after position p is SCRIPT[p]: what comes depends on the length of the prompt alone.
SCRIPT = ("naïve 😀 café, " * 80).encode()


def said_after(prompt_tokens: int, count: int) -> str:
    """What the model says after a prompt of this length."""
    return SCRIPT[prompt_tokens - 1 : prompt_tokens - 1 + count].decode(errors="replace")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scripted_model(tmp_path_factory.mktemp("scripted"), [*(5 + byte for byte in SCRIPT)], max_positions=CONTEXT)


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Served]:
    server = Served(model, max_model_len=CONTEXT)
    yield server
    server.kill()


@pytest.fixture
def own_server(model: Path) -> Iterator[Served]:
    server = Served(model, "--max-num-queued-reqs", "4", max_model_len=CONTEXT)
    yield server
    server.kill()


def test_completions_say_what_the_model_says(served: Served):
    body = served.post("/v1/completions", prompt="abc", max_tokens=40, temperature=0).json()

    assert body["choices"][0]["text"] == said_after(3, 40)
    assert body["usage"] == usage_of(3, 40)


def test_streams_say_the_same(served: Served):
    response = served.post("/v1/completions", prompt="abc", max_tokens=40, temperature=0, stream=True)

    parts = choices(response.text)
    assert "".join(part["text"] for part in parts) == said_after(3, 40)
    assert not any("\ufffd" in part["text"] for part in parts)
    assert parts[-1]["finish_reason"] == "length"


def test_the_official_client_chats(served: Served):
    count = len(served.post("/tokenize", messages=HELLO).json()["tokens"])
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        whole = client.chat.completions.create(model="scripted", messages=HELLO, max_tokens=24, temperature=0)
        stream = client.chat.completions.create(model="scripted", messages=HELLO, max_tokens=24, temperature=0, stream=True)
        streamed = "".join(part.choices[0].delta.content or "" for part in stream)

    assert whole.choices[0].message.content == streamed == said_after(count, 24)


def test_chat_logprobs_join_to_the_text(served: Served):
    body = served.post("/v1/chat/completions", messages=HELLO, max_tokens=30, temperature=0, logprobs=True, top_logprobs=3).json()

    content = body["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode(errors="replace") == body["choices"][0]["message"]["content"]
    assert all(len(entry["top_logprobs"]) == 3 for entry in content)
    assert all(entry["top_logprobs"][0]["logprob"] == entry["logprob"] for entry in content)


@pytest.mark.parametrize("streamed", [False, True])
def test_prompts_are_scored_without_a_visible_token(served: Served, streamed: bool):
    response = served.post("/v1/completions", prompt="naïve", echo=True, logprobs=2, max_tokens=0, temperature=0, stream=streamed)
    (choice, *_) = choices(response.text) if streamed else response.json()["choices"]

    assert choice["text"] == "naïve"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["n", "a", "bytes:\\xc3", "bytes:\\xaf", "v", "e"]
    assert logprobs["text_offset"] == [0, 1, 2, 2, 3, 4]
    assert logprobs["token_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])


def test_stop_strings_cut_where_they_start(served: Served):
    for streamed in (False, True):
        response = served.post("/v1/completions", prompt="a", max_tokens=60, temperature=0, stop=["café"], stream=streamed)
        parts = choices(response.text) if streamed else response.json()["choices"]
        assert "".join(part["text"] for part in parts) == "naïve 😀 "
        assert (parts[-1]["finish_reason"], parts[-1]["stop_reason"]) == ("stop", "café")


def test_stop_token_ids_end_the_text(served: Served):
    (comma,) = script_ids(",")

    body = served.post("/v1/completions", prompt="a", max_tokens=60, temperature=0, stop_token_ids=[comma]).json()
    with_it = served.post(
        "/v1/completions", prompt="a", max_tokens=60, temperature=0, stop_token_ids=[comma], include_stop_str_in_output=True
    ).json()

    assert body["choices"][0]["text"] == "naïve 😀 café"
    assert body["choices"][0]["stop_reason"] == comma
    assert with_it["choices"][0]["text"] == "naïve 😀 café,"


def test_cached_tokens_are_reported(served: Served):
    prompt = [5 + i % 250 for i in range(200)]

    first = served.post("/v1/completions", prompt=prompt, max_tokens=1).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    second = served.post("/v1/completions", prompt=prompt, max_tokens=1).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    salted = served.post("/v1/completions", prompt=prompt, max_tokens=1, cache_salt="s").json()["usage"]["prompt_tokens_details"][
        "cached_tokens"
    ]

    assert (first, salted) == (0, 0)
    assert 100 < second < 200


def test_batches_with_several_sequences(served: Served):
    body = served.post("/v1/completions", prompt=["ab", "abcd"], n=2, max_tokens=8, temperature=0.5).json()

    assert [choice["text"] for choice in body["choices"]] == [said_after(2, 8)] * 2 + [said_after(4, 8)] * 2
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": [5] * (CONTEXT + 1000)}, "prompt"),
        ({"prompt": [5] * CONTEXT}, "prompt"),
        ({"prompt": "a", "n": 5_000_000}, "n"),
        ({"prompt": "a", "logprobs": 10**9}, "logprobs"),
        ({"prompt": "a", "max_tokens": 10**9}, "max_tokens"),
        ({"prompt": "a", "stop_token_ids": [10**6], "min_tokens": 1}, "stop_token_ids"),
        ({"prompt": "a", "allowed_token_ids": [10**6]}, "allowed_token_ids"),
    ],
)
def test_requests_that_cannot_be_served_are_refused_and_others_go_on(served: Served, body, param):
    assert error_of(served.post("/v1/completions", **body))["param"] == param
    assert served.post("/v1/completions", prompt="abc", max_tokens=4, temperature=0).json()["choices"][0]["text"] == said_after(3, 4)


def test_the_longest_prompt_gets_one_token(served: Served):
    body = served.post("/v1/completions", prompt=[5] * (CONTEXT - 1), max_tokens=1).json()

    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 1


def test_a_time_limit_ends_a_request(served: Served):
    body = {"prompt": "a", "max_tokens": 1000, "ignore_eos": True}
    response = httpx.post(served.url + "/v1/completions", json=body, headers={"X-Request-Timeout": "0.05"}, timeout=60)

    assert response.status_code == 504
    assert eventually(lambda: served.metric("num_requests_running") == 0, 2)


def test_a_hundred_clients_that_leave_midway_leave_no_used_pages(served: Served):
    payload = b'{"prompt": "abc", "stream": %s, "max_tokens": 1000, "ignore_eos": true}'
    host, port = served.url.removeprefix("http://").split(":")
    clients = []
    for number in range(100):
        body = payload % (b"true" if number % 2 else b"false")
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        client = socket.create_connection((host, int(port)))
        client.sendall(head.encode() + body)
        clients.append(client)
    assert eventually(lambda: served.metric("num_requests_running") > 0, 10)

    for client in clients:
        client.close()

    assert eventually(lambda: served.metric("num_requests_running") + served.metric("num_requests_waiting") == 0, 2)
    assert eventually(lambda: served.metric("kv_cache_usage_perc") == 0, 2)
    assert httpx.get(served.url + "/load").json() == {"server_load": 0}


def test_a_full_queue_refuses_with_retry_after_and_the_others_finish(own_server: Served):
    with ThreadPoolExecutor(30) as pool:
        answers = list(pool.map(lambda _: own_server.post("/v1/completions", prompt="a", max_tokens=200, ignore_eos=True), range(30)))

    served = [answer for answer in answers if answer.status_code == 200]
    refused = [answer for answer in answers if answer.status_code == 503]
    assert len(served) >= 12
    assert refused
    assert len(served) + len(refused) == 30
    assert all(answer.headers["retry-after"] and "queue" in error_of(answer)["message"] for answer in refused)
    assert {answer.json()["usage"]["completion_tokens"] for answer in served} == {200}


def test_an_engine_that_is_killed_ends_open_requests_and_the_server_closes_orderly(own_server: Served):
    (engine,) = [child for child in own_server.children() if child.is_running()]
    body = {"prompt": "a", "stream": True, "max_tokens": 1000, "ignore_eos": True}
    with httpx.stream("POST", own_server.url + "/v1/completions", json=body, timeout=60) as response:
        parts = response.iter_text()
        seen = next(parts)
        engine.kill()
        killed = time.monotonic()
        seen += "".join(parts)
        took = time.monotonic() - killed

    assert took < 2
    assert chunks(seen)[-1]["error"]["code"] == 503
    assert httpx.get(own_server.url + "/health").status_code == 503
    assert own_server.post("/v1/completions", prompt="a").status_code == 503
    own_server.process.send_signal(signal.SIGTERM)
    assert own_server.process.wait(15) == 0, "".join(own_server.log)


def test_a_server_that_is_told_to_stop_leaves_no_process(own_server: Served):
    children = own_server.children()
    assert children

    own_server.process.send_signal(signal.SIGTERM)

    assert own_server.process.wait(15) == 0, "".join(own_server.log)
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    assert "Traceback" not in "".join(own_server.log)


def test_a_server_that_is_killed_leaves_no_process(own_server: Served):
    children = own_server.children()

    own_server.process.kill()
    own_server.process.wait(10)

    assert eventually(lambda: not [c for c in children if c.is_running() and c.status() != psutil.STATUS_ZOMBIE], 10)
