"""Taking the output of models apart: answer, reasoning and tool calls, in the formats in which models write them."""

from __future__ import annotations

from jaxllm.server.parsers.detect import opens_reasoning, reasoning_format_of, tool_format_of
from jaxllm.server.parsers.events import ArgumentsDelta, ContentDelta, Event, ReasoningDelta, ToolCallStart
from jaxllm.server.parsers.formats import ReasoningFormat, ToolFormat
from jaxllm.server.parsers.parser import OutputParser
from jaxllm.server.parsers.tables import REASONING_FORMATS, TOOL_FORMATS

__all__ = [
    "REASONING_FORMATS",
    "TOOL_FORMATS",
    "ArgumentsDelta",
    "ContentDelta",
    "Event",
    "OutputParser",
    "ReasoningDelta",
    "ReasoningFormat",
    "ToolCallStart",
    "ToolFormat",
    "opens_reasoning",
    "reasoning_format_of",
    "tool_format_of",
]
