"""What a parser reports while a model writes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A tool call begins. `id` is the model's own, or None where it gave none (or one that was used before)."""

    index: int
    name: str
    id: str | None


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of the JSON object with the arguments of call `index`."""

    index: int
    text: str


Event = ContentDelta | ReasoningDelta | ToolCallStart | ArgumentsDelta
