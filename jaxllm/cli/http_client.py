"""A small synchronous client of an OpenAI-compatible server, for the terminal commands."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Sequence
from typing import Any, Self
from urllib.parse import urlsplit

import httpx

from jaxllm.cli.backends import Message, Piece, Sampling
from jaxllm.errors import ConfigError, InvalidRequestError, JaxllmError

# Connecting is quick or fails; an answer may be queued behind others for as long as it takes.
_TIMEOUT = httpx.Timeout(10.0, read=None)
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class ServerError(JaxllmError):
    """The server answered with an error, or went away in the middle of an answer."""


class HttpBackend:
    """Streams answers from a server.

    Args:
        url: base URL, `/v1` included.
        model: the model to ask for; None asks the server for its first one.
        hint: what else would work where no server answers.
    """

    def __init__(self, url: str, *, model: str | None = None, api_key: str | None = None, hint: str = "or name another"):
        self.url = url.rstrip("/")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url must look like http://host:8000/v1, got {url!r}")
        self._hint = hint
        self.headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # A proxy cannot reach this machine's own server.
        self._http = httpx.Client(timeout=_TIMEOUT, headers=self.headers, trust_env=parts.hostname not in _LOOPBACK)
        self._model = model

    @property
    def model(self) -> str:
        if self._model is None:
            self._model = self._first_model()
        return self._model

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._http.close()

    def chat(self, messages: Sequence[Message], sampling: Sampling) -> Generator[Piece]:
        body = {"model": self.model, "messages": list(messages), "stream": True, **sampling}
        for choice in self._stream("/chat/completions", body):
            yield Piece(choice.get("delta", {}).get("content") or "", choice.get("finish_reason"))

    def complete(self, prompt: str, sampling: Sampling) -> Generator[Piece]:
        body = {"model": self.model, "prompt": prompt, "stream": True, **sampling}
        for choice in self._stream("/completions", body):
            yield Piece(choice.get("text") or "", choice.get("finish_reason"))

    def _first_model(self) -> str:
        try:
            response = self._http.get(self.url + "/models")
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        _raise_for_error(response)
        try:
            return str(response.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise ServerError(f"{self.url}/models lists no model; name one with --model-name, or check --url") from None

    def _stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        try:
            with self._http.stream("POST", self.url + path, json=body) as response:
                if response.status_code != httpx.codes.OK:
                    response.read()
                    _raise_for_error(response)
                for line in response.iter_lines():
                    if (event := read_event(line)) is None:
                        return
                    yield from event.get("choices", ())
                raise ServerError("the stream ended before the answer was complete")
        except httpx.ConnectError as error:
            raise self._unreachable(error) from None
        except httpx.HTTPError as error:
            raise ServerError(f"the server at {self.url} went away in the middle of an answer ({error})") from None

    def _unreachable(self, error: httpx.HTTPError) -> ServerError:
        return ServerError(f"no server answers at {self.url} ({error}); start one with `jaxllm serve`, {self._hint}")


def read_event(line: str) -> dict[str, Any] | None:
    """The event of one line of an SSE stream: {} where the line has none, None at the end. Raises ServerError for an error event."""
    data = line.removeprefix("data:").strip()
    if data == line.strip():
        return {}
    event: dict[str, Any] | None = None if data == "[DONE]" else json.loads(data)
    if event is not None and "error" in event:
        raise ServerError(_message(event))
    return event


def _raise_for_error(response: httpx.Response) -> None:
    if response.is_success:
        return
    try:
        message = _message(response.json())
    except ValueError:
        message = response.text.strip()[:200] or response.reason_phrase
    if response.status_code in (400, 404, 422):
        raise InvalidRequestError(message)
    raise ServerError(f"HTTP {response.status_code}: {message}")


def _message(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message", error)) if isinstance(error, dict) else str(error or body)
