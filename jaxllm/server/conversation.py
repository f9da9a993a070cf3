"""Conversations as chat templates want them, whichever API they came by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]


def with_instructions(instructions: str | None, messages: Sequence[Message]) -> list[Message]:
    """The conversation under its system message. System messages at the front become one, since most templates allow only one."""
    head: list[str] = [instructions] if instructions else []
    rest = list(messages)
    count = 0
    while count < len(rest) and rest[count]["role"] in ("system", "developer"):
        content = rest[count]["content"]
        head += [content] if isinstance(content, str) else [part["text"] for part in content]
        count += 1
    if not instructions and count < 2:
        return rest
    return [{"role": "system", "content": "\n\n".join(head)}, *rest[count:]]
