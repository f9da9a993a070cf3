"""Small things that many server tests use."""

from __future__ import annotations

import json
from typing import Any

HELLO = [{"role": "user", "content": "hi"}]


def events(body: str) -> list[str]:
    """The data of a server-sent event stream, in order."""
    assert body.endswith("\n\n")
    found = []
    for event in body.removesuffix("\n\n").split("\n\n"):
        assert event.startswith("data: "), event
        found.append(event.removeprefix("data: "))
    return found


def chunks(body: str) -> list[dict[str, Any]]:
    """The JSON chunks of a stream that ended with [DONE]."""
    *data, last = events(body)
    assert last == "[DONE]"
    return [json.loads(item) for item in data]


def choices(body: str, index: int = 0) -> list[dict[str, Any]]:
    """The parts of one choice of a stream, in order."""
    return [choice for chunk in chunks(body) for choice in chunk["choices"] if choice["index"] == index]


def error_of(response: Any) -> dict[str, Any]:
    """The error of a refused request, after checking that it has OpenAI's shape."""
    body = response.json()
    assert set(body) == {"error"}, body
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["code"] == response.status_code
    return body["error"]
