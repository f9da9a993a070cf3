"""Small things that many server tests use."""

from __future__ import annotations

import json
from typing import Any

HELLO = [{"role": "user", "content": "hi"}]


def usage_of(prompt: int, completion: int, cached: int = 0, reasoning: int = 0) -> dict[str, Any]:
    """The usage of a request, complete as every response has it."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }


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
