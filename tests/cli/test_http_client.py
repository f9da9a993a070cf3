"""The terminal's HTTP client against a server that answers from a script."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from jaxllm.cli.http_client import HttpBackend, ServerError, read_event
from jaxllm.cli.main import main
from jaxllm.errors import ConfigError, InvalidRequestError


class Server(ThreadingHTTPServer):
    """Lists the model `m`; answers every POST with `status` and `body`, and keeps what it was sent."""

    status = 200
    body = b""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen: list[tuple[str, dict[str, Any], str | None]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"

    def events(self, *events: dict[str, Any], done: bool = True) -> None:
        lines = [f"data: {json.dumps(event)}\n\n" for event in events] + (["data: [DONE]\n\n"] if done else [])
        self.body = (": a comment\n\n" + "".join(lines)).encode()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._send(200, json.dumps({"data": [{"id": "m"}, {"id": "other"}]}).encode())

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, request, self.headers.get("Authorization")))
        self._send(self.server.status, self.server.body)

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_chat_streams_the_text_of_its_deltas(server: Server):
    server.events(
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"content": "Hé"}}]},
        {"choices": [{"delta": {"content": "llo"}, "finish_reason": "length"}]},
        {"choices": [], "usage": {}},
    )

    with HttpBackend(server.url, api_key="k") as backend:
        pieces = list(backend.chat([{"role": "user", "content": "hi"}], {"max_tokens": 5, "temperature": 0.0}))

    assert "".join(piece.text for piece in pieces) == "Héllo"
    assert pieces[-1].finish_reason == "length"
    [(path, request, authorization)] = server.seen
    assert path == "/v1/chat/completions"
    assert request == {
        "model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 5, "temperature": 0.0,
    }  # fmt: skip
    assert authorization == "Bearer k"


def test_a_completion_streams_its_text(server: Server):
    server.events({"choices": [{"text": " a", "finish_reason": None}]}, {"choices": [{"text": " b", "finish_reason": "stop"}]})

    with HttpBackend(server.url, model="other") as backend:
        assert "".join(piece.text for piece in backend.complete("x", {})) == " a b"

    assert server.seen[0][:2] == ("/v1/completions", {"model": "other", "prompt": "x", "stream": True})


@pytest.mark.parametrize(
    ("status", "body", "kind", "message"),
    [
        (400, {"error": {"message": "too long", "type": "BadRequestError"}}, InvalidRequestError, "^too long$"),
        (401, {"error": "Unauthorized"}, ServerError, "HTTP 401: Unauthorized"),
        (503, {"error": {"message": "queue full"}}, ServerError, "HTTP 503: queue full"),
        (502, "<html>bad gateway</html>", ServerError, "HTTP 502"),
    ],
)
def test_error_bodies_become_messages(server: Server, status: int, body: Any, kind: type[Exception], message: str):
    server.status, server.body = status, (body if isinstance(body, str) else json.dumps(body)).encode()

    with HttpBackend(server.url) as backend, pytest.raises(kind, match=message):
        list(backend.complete("x", {}))


def test_an_error_event_ends_the_stream_with_its_message(server: Server):
    server.events({"choices": [{"text": "a"}]}, {"error": {"message": "engine died"}})

    with HttpBackend(server.url) as backend, pytest.raises(ServerError, match="engine died"):
        list(backend.complete("x", {}))


def test_a_stream_that_breaks_off_is_an_error_not_an_answer(server: Server):
    server.events({"choices": [{"text": "a"}]}, done=False)

    with HttpBackend(server.url) as backend, pytest.raises(ServerError, match="before the answer was complete"):
        list(backend.complete("x", {}))


def test_no_server_says_how_to_start_one(server: Server, capsys: pytest.CaptureFixture[str]):
    url = server.url
    server.server_close()

    assert main(["chat", "--url", url, "-q", "hi"]) == 1

    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "jaxllm serve" in err
    assert "jaxllm chat MODEL" in err


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x/v1", "http://"])
def test_what_is_no_url_is_refused(url: str):
    with pytest.raises(ConfigError, match="--url must look like"):
        HttpBackend(url)


def test_quick_answers_go_to_stdout_alone(server: Server, capsys: pytest.CaptureFixture[str]):
    server.events({"choices": [{"delta": {"content": "Paris"}, "finish_reason": "stop"}]})

    assert main(["chat", "--url", server.url, "-q", "Capital of France?"]) == 0

    assert capsys.readouterr().out == "Paris\n"


def test_a_model_here_and_a_server_exclude_each_other(capsys: pytest.CaptureFixture[str]):
    assert main(["chat", "some/model", "--url", "http://localhost:1/v1"]) == 2
    assert "--url" in capsys.readouterr().err


def test_keys_come_from_the_environment_when_no_flag_gives_one(server: Server, monkeypatch: pytest.MonkeyPatch):
    server.events({"choices": [{"text": "a"}]})
    monkeypatch.delenv("JAXLLM_API_KEY", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "from-environment")

    main(["complete", "--url", server.url, "-q", "x"])

    assert server.seen[0][2] == "Bearer from-environment"


def test_lines_of_events():
    assert [read_event(line) for line in ('data: {"a": 1}', "", ": comment", "data: [DONE]")] == [{"a": 1}, {}, {}, None]


class Endless(Handler):
    """Streams a word every few milliseconds until the client leaves."""

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, request, None))
        self.send_response(200)
        self.end_headers()
        event = f"data: {json.dumps({'choices': [{'delta': {'content': 'word '}}]})}\n\n".encode()
        with contextlib.suppress(OSError):
            while True:
                self.wfile.write(event)
                time.sleep(0.01)


def test_ctrl_c_stops_the_answer_and_the_conversation_goes_on(server: Server):
    server.RequestHandlerClass = Endless
    server.daemon_threads = True
    command = [sys.executable, "-m", "jaxllm.cli.main", "chat", "--url", server.url]
    pipe = subprocess.PIPE
    # A test run in the background ignores SIGINT, and its children would, too.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, preexec_fn=heed) as chat:
        assert chat.stdin is not None
        assert chat.stdout is not None
        for question in ("one\n", "two\n"):
            chat.stdin.write(question)
            chat.stdin.flush()
            assert chat.stdout.read(5) == "word "
            chat.send_signal(signal.SIGINT)
            # The rest of the line that was interrupted.
            chat.stdout.readline()
        _, err = chat.communicate(timeout=30)

    assert chat.returncode == 0
    assert err.count("[stopped]") == 2
    assert [message["role"] for message in server.seen[1][1]["messages"]] == ["user", "assistant", "user"]
