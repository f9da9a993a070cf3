"""What the Messages API answers with."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class TextBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    text: str = ""
    citations: None = None


class ThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str = ""
    signature: str = ""


class ToolUseBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any] = {}


Block = TextBlock | ThinkingBlock | ToolUseBlock
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageUsage(msgspec.Struct, kw_only=True):
    """`input_tokens` are those that were computed; what the prefix cache held is counted apart."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int


class MessageObject(msgspec.Struct, kw_only=True):
    """Body of a response of /v1/messages."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Block] = []
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class TokenCount(msgspec.Struct):
    """Body of a response of /v1/messages/count_tokens."""

    input_tokens: int
