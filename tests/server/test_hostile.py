"""Requests of those who are careless, or mean it: each gets an answer of a bounded size at once, and nobody else notices."""

from __future__ import annotations

import gzip
import json
import logging
import socket
from collections.abc import Callable
from typing import Any

import pytest
from starlette.testclient import TestClient

from jaxllm.errors import ConfigError
from jaxllm.server.config import ServerConfig
from jaxllm.server.errors import MAX_MESSAGE_CHARS
from jaxllm.server.http import MAX_HEAD_BYTES
from tests.server.conftest import LiveServer, serving_state
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import HELLO, error_of
from tests.server.served import eventually

MANY = 5_000
CALL = {"id": "c", "type": "function", "function": {"name": "f"}}


def called_with(arguments: str) -> list[dict[str, Any]]:
    function = {"name": "f", "arguments": arguments}
    return [*HELLO, {"role": "assistant", "content": "", "tool_calls": [{**CALL, "function": function}]}, *HELLO]


# ------------------------------------------------------------------------------------------------------------------- bodies


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "a", "stop_token_ids": ["x"] * MANY}, "stop_token_ids.0"),
        ("/v1/completions", {"prompt": "a", "allowed_token_ids": [None] * MANY}, "allowed_token_ids.0"),
        ("/v1/completions", {"prompt": "a", "stop": [1] * MANY}, "stop.0"),
        ("/v1/completions", {"prompt": "a", "bad_words": [1] * MANY}, "bad_words.0"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {f"x{i}": 1 for i in range(MANY)}}, "logit_bias"),
        ("/v1/chat/completions", {"messages": [1] * MANY}, "messages.0"),
        ("/v1/chat/completions", {"messages": HELLO, "tools": [1] * MANY}, "tools.0"),
        ("/v1/chat/completions", {"messages": HELLO, "documents": [1] * MANY}, "documents.0"),
        ("/v1/chat/completions/batch", {"messages": [[1] * MANY]}, "messages.0.0"),
        ("/v1/responses", {"input": "a", "metadata": {f"x{i}": 1 for i in range(MANY)}}, "metadata"),
        ("/v1/responses", {"input": "a", "include": [1] * MANY}, "include.0"),
        ("/inference/v1/generate", {"token_ids": ["x"] * MANY}, "token_ids.0"),
        ("/tokenize", {"messages": [1] * MANY}, "messages.0"),
        ("/detokenize", {"tokens": ["x"] * MANY}, "tokens.0"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_of_a_flood_of_faults_one_is_told(client: TestClient, path: str, body: dict[str, Any], param: str):
    error = error_of(client.post(path, json=body))

    assert error["param"] == param
    assert "more errors" not in error["message"]


def test_compressed_bodies_are_named(client: TestClient):
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    answer = client.post("/v1/completions", content=gzip.compress(b'{"prompt": "a"}'), headers=headers)

    assert error_of(answer)["message"] == "the content encoding 'gzip' is not supported; send the body as it is"


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": {"x": "y" * 100_000}}]},
        {"messages": HELLO, "logit_bias": {"x" * 100_000: 1}},
        {"messages": HELLO, "tools": [{"type": "x" * 100_000}]},
        {"messages": [*HELLO, {"role": "assistant", "tool_calls": "x" * 100_000}]},
        {"messages": HELLO, "chat_template": "{{ raise_exception('x' * 100000) }}"},
    ],
    ids=["content", "key", "tool", "calls", "template"],
)
def test_what_is_refused_is_not_sent_back_whole(make_client: Callable[..., TestClient], body: dict[str, Any]):
    response = make_client(trust_request_chat_template=True).post("/v1/chat/completions", json=body)

    assert error_of(response)["code"] == 400
    assert len(response.text) < 2 * MAX_MESSAGE_CHARS


@pytest.mark.parametrize("more", [{"messages": called_with('{"a": "\\ud800"}')}, {"chat_template": '{{ "\\ud800" }}'}])
def test_lone_surrogates_in_escapes_are_refused(make_client: Callable[..., TestClient], more: dict[str, Any]):
    template = "{% for m in messages %}{{ m.tool_calls | tojson if m.tool_calls else m.content }}{% endfor %}"
    client = make_client(trust_request_chat_template=True)

    error = error_of(client.post("/v1/chat/completions", json={"messages": HELLO, "chat_template": template, **more}))

    assert (error["code"], error["param"]) == (400, "messages")
    assert "surrogates" in error["message"]


def test_a_refused_upload_ends_its_connection(make_client: Callable[..., TestClient]):
    client, headers = make_client(max_request_body_size=1000), {"content-type": "application/json"}

    for content in (b"x" * 2000, iter([b"x" * 100] * 20)):
        response = client.post("/v1/completions", content=content, headers=headers)
        assert (response.status_code, response.headers["connection"]) == (413, "close")


# ---------------------------------------------------------------------------------------------------------------------- keys


def test_white_space_around_keys_means_nothing(make_client: Callable[..., TestClient], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAXLLM_API_KEY", "from a file\n")
    for client, key in ((make_client(), "from a file"), (make_client(api_key=" clé "), "clé")):
        for header in (f"Bearer {key}", f"bearer  {key}"):
            assert client.get("/v1/models", headers={"authorization": header.encode()}).status_code == 200
        for header in ("", "Bearer", "Bearer ", f"Basic {key}", f"Bearer{key}", f"Bearer {key}\x85", key):
            refused = client.get("/v1/models", headers={"authorization": header.encode()})
            assert refused.status_code == 401
            assert error_of(refused)["type"] == "AuthenticationError"


def test_a_blank_key_locks_nobody_out_and_opens_nothing(make_client: Callable[..., TestClient], monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="api_key"):
        ServerConfig(api_key=" ")
    monkeypatch.setenv("JAXLLM_API_KEY", " ")
    assert make_client().get("/v1/models").status_code == 200


def test_bytes_that_are_no_text_may_be_a_key(engine: FakeEngine):
    """The command line gives them as lone surrogates."""
    with LiveServer(serving_state(engine, api_key="\udcff\udcfe")) as live:
        for key, status in ((b"\xff\xfe", b"200"), (b"\xff", b"401")):
            wire = Wire(live)
            wire.send(b"GET /v1/models HTTP/1.1\r\nAuthorization: Bearer %b\r\n\r\n" % key)
            assert wire.read_to(b"}").startswith(b"HTTP/1.1 " + status)


# ---------------------------------------------------------------------------------------------------------------------- HTTP


def test_probes_may_ask_for_the_head_alone(client: TestClient):
    assert [client.head(path).status_code for path in ("/health", "/ready")] == [200, 200]


class Wire:
    """A connection of bytes."""

    def __init__(self, live: LiveServer):
        self._socket = socket.create_connection(live.listener.getsockname())
        self._socket.settimeout(10)

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def read_to(self, end: bytes) -> bytes:
        """What comes up to `end`, or to the end of the connection."""
        got = b""
        while end not in got and (more := self._socket.recv(65536)):
            got += more
        return got

    def close(self) -> None:
        self._socket.close()


def post_of(body: bytes, *headers: bytes, path: bytes = b"/v1/completions") -> bytes:
    lines = [b"POST %b HTTP/1.1" % path, b"Host: x", b"Content-Type: application/json", *headers]
    return b"\r\n".join([*lines, b"Content-Length: %d" % len(body), b"", body])


def test_an_offer_to_upgrade_is_passed_over(live: LiveServer):
    wire = Wire(live)
    offer = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA")
    request = post_of(b'{"prompt": "a", "max_tokens": 3}', *offer)

    wire.send(request)
    first = wire.read_to(b"cached_tokens")
    wire.send(request[:250])
    wire.send(request[250:])
    second = wire.read_to(b"cached_tokens")

    for answer in (first, second):
        assert answer.startswith(b"HTTP/1.1 200")
        assert b'"text":"Hel"' in answer


def test_requests_may_follow_each_other_without_waiting(live: LiveServer):
    wire = Wire(live)
    wire.send(
        post_of(b'{"prompt": "a", "max_tokens": 1}') + post_of(b'{"prompt": "a", "max_tokens": 2}') + b"GET /version HTTP/1.1\r\n\r\n"
    )

    got = wire.read_to(b'"version"')

    assert got.index(b'"text":"H"') < got.index(b'"text":"He"') < got.index(b'"version"')
    assert got.count(b"HTTP/1.1 200") == 3


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (b"nonsense\r\n\r\n", b"Invalid HTTP request"),
        (b"CONNECT other:443 HTTP/1.1\r\nHost: other\r\n\r\n", b"no proxy"),
        (post_of(b"{}", b"Transfer-Encoding: chunked"), b"Invalid HTTP request"),
        (b"GET /health HTTP/1.1\r\nX-Request-Id: a\x00b\r\n\r\n", b"Invalid HTTP request"),
        (b"GET /health HTTP/1.1\r\n" + b"X: y\r\n" * (MAX_HEAD_BYTES // 6), b"may hold"),
        (b"GET /health HTTP/1.1\r\nX: " + b"y" * (MAX_HEAD_BYTES + 1), b"may hold"),
        (b"GET /" + b"y" * (MAX_HEAD_BYTES + 1), b"may hold"),
    ],
    ids=["nonsense", "connect", "two lengths", "nul", "many headers", "long header", "long path"],
)
def test_what_is_no_request_is_answered_and_the_connection_closed(live: LiveServer, request_: bytes, said: bytes):
    wire = Wire(live)
    wire.send(request_)

    got = wire.read_to(b"\0")

    assert got.startswith(b"HTTP/1.1 400")
    assert said in got


@pytest.mark.parametrize(
    "path", [b"/v1/completions", b"/v1/chat/completions", b"/v1/messages", b"/v1/responses", b"/invocations", b"/tokenize"]
)
def test_a_client_that_leaves_within_its_body_is_no_error(live: LiveServer, caplog: pytest.LogCaptureFixture, path: bytes):
    with caplog.at_level(logging.INFO):
        wire = Wire(live)
        wire.send(post_of(b'{"prompt": "a"}', path=path)[:-5])
        wire.close()
        wire = Wire(live)
        wire.send(b"GET /version HTTP/1.1\r\n\r\n")
        assert wire.read_to(b"}")

    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


STREAMS = {
    b"/v1/completions": {"prompt": "a"},
    b"/v1/chat/completions": {"messages": HELLO},
    b"/v1/messages": {"messages": HELLO, "max_tokens": 400},
    b"/v1/responses": {"input": "a"},
    b"/inference/v1/generate": {"token_ids": [70], "sampling_params": {"ignore_eos": True}},
    b"/invocations": {"prompt": "a"},
}


@pytest.mark.parametrize("path", STREAMS)
def test_a_client_that_leaves_a_stream_ends_its_request(live: LiveServer, engine: FakeEngine, path: bytes):
    engine.script = engine.script[:1] * 500
    wire = Wire(live)
    wire.send(post_of(json.dumps({**STREAMS[path], "stream": True}).encode(), path=path))
    assert wire.read_to(b"data: ").startswith(b"HTTP/1.1 200")

    wire.close()

    assert eventually(lambda: not engine.open and not live.state.open_tasks, 5)
