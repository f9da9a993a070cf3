"""Streams that fail, and clients that leave, against a live server."""

from __future__ import annotations

import asyncio
import socket
import time

import httpx
import pytest

from jaxllm.errors import EngineDeadError, RequestFailedError
from tests.server.conftest import LiveServer
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import HELLO, chunks, events

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def eventually(condition, seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.005)
    return condition()


async def forever(request, position):
    await asyncio.sleep(3600 if position else 0)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineDeadError("the engine process was killed"), 503),
        (RequestFailedError("the logits are not finite"), 500),
        (ValueError("bug"), 500),
    ],
)
@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "a"}), (COMPLETIONS, {"prompt": ["a", "b"]})]
)
def test_a_failure_in_mid_stream_is_an_event_before_done(live: LiveServer, engine: FakeEngine, path, body, error, code):
    def fail(request, position):
        if position == 3:
            raise error
        return asyncio.sleep(0)

    engine.on_token = fail
    response = httpx.post(live.url + path, json={**body, "stream": True})

    assert response.status_code == 200
    *_, failed = chunks(response.text)
    assert failed["error"]["code"] == code
    assert "bug" not in failed["error"]["message"]
    assert events(response.text)[-1] == "[DONE]"
    assert not engine.open


def test_stream_headers_keep_proxies_from_buffering(live: LiveServer):
    response = httpx.post(live.url + CHAT, json={"messages": HELLO, "stream": True})

    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"


def test_tokens_are_sent_as_they_come(live: LiveServer, engine: FakeEngine):
    engine.on_token = forever

    with httpx.stream("POST", live.url + CHAT, json={"messages": HELLO, "stream": True}) as response:
        seen = ""
        for text in response.iter_text():
            seen += text
            if '"content":"H"' in seen:
                break

    assert '"role":"assistant"' in seen


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("body", [{"prompt": "a", "n": 2}, {"prompt": ["a", "b", "c"]}])
def test_a_client_that_leaves_ends_its_requests_in_the_engine(live: LiveServer, engine: FakeEngine, streamed: bool, body):
    engine.on_token = forever

    with pytest.raises(httpx.ReadTimeout):
        httpx.post(live.url + COMPLETIONS, json={**body, "stream": streamed}, timeout=0.2)

    assert engine.seen
    assert eventually(lambda: not engine.open)
    assert eventually(lambda: not live.state.open_tasks)
    assert httpx.get(live.url + "/load").json() == {"server_load": 0}


def test_a_hundred_clients_that_leave_midway_leave_nothing_behind(live: LiveServer, engine: FakeEngine):
    engine.on_token = forever
    payload = b'{"prompt": "a", "stream": true, "max_tokens": 100}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    address = live.listener.getsockname()

    clients = [socket.create_connection(address) for _ in range(100)]
    for client in clients:
        client.sendall(head.encode() + payload)
    assert eventually(lambda: len(engine.open) == 100)
    for client in clients:
        client.close()

    assert eventually(lambda: not engine.open)
    engine.on_token = lambda request, position: asyncio.sleep(0)
    assert httpx.post(live.url + COMPLETIONS, json={"prompt": "a"}).status_code == 200


def test_the_load_counts_open_requests(live: LiveServer, engine: FakeEngine):
    engine.on_token = forever

    with httpx.stream("POST", live.url + CHAT, json={"messages": HELLO, "stream": True}) as response:
        parts = response.iter_text()
        next(parts)
        assert httpx.get(live.url + "/load").json() == {"server_load": 1}


def test_a_connection_serves_one_request_after_another(live: LiveServer):
    with httpx.Client(base_url=live.url) as client:
        for _ in range(3):
            assert chunks(client.post(CHAT, json={"messages": HELLO, "stream": True}).text)
            assert client.post(CHAT, json={"messages": HELLO}).status_code == 200


def test_running_requests_are_told_when_the_server_closes(live: LiveServer, engine: FakeEngine):
    engine.on_token = forever

    with httpx.stream("POST", live.url + CHAT, json={"messages": HELLO, "stream": True}) as response:
        parts = response.iter_text()
        seen = next(parts)
        live.state.close()
        live.state.cancel_open()
        seen += "".join(parts)

    *_, last = chunks(seen)
    assert last["error"]["code"] == 503
    assert not engine.open
    assert httpx.post(live.url + CHAT, json={"messages": HELLO}).status_code == 503
