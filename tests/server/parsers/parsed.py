"""What a parser reported, put together; and ways to cut its input."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from jaxllm.server.parsers import ArgumentsDelta, ContentDelta, OutputParser, ReasoningDelta, ToolCallStart


@dataclass
class Call:
    name: str
    id: str | None = None
    arguments: str = ""

    @property
    def value(self) -> Any:
        return json.loads(self.arguments)


@dataclass
class Parsed:
    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    @property
    def named(self) -> list[tuple[str, Any]]:
        """Names and values of the calls."""
        return [(call.name, call.value) for call in self.calls]


def parse(parser: OutputParser, pieces: Iterable[str], *, truncated: bool = False) -> Parsed:
    """Feed the pieces and join what is reported; checks that calls come in order."""
    parsed = Parsed()
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish(truncated=truncated)
    for event in events:
        if isinstance(event, ContentDelta):
            assert event.text
            parsed.content += event.text
        elif isinstance(event, ReasoningDelta):
            assert event.text
            parsed.reasoning += event.text
        elif isinstance(event, ToolCallStart):
            assert event.index == len(parsed.calls)
            parsed.calls.append(Call(event.name, event.id))
        elif isinstance(event, ArgumentsDelta):
            assert event.text
            assert event.index == len(parsed.calls) - 1
            parsed.calls[-1].arguments += event.text
    return parsed


def chunkings(text: str) -> Iterator[list[str]]:
    """The whole; pieces of 1, 2, 3, 5 and 7 characters; and every cut into two."""
    yield [text]
    for size in (1, 2, 3, 5, 7):
        yield [text[start : start + size] for start in range(0, len(text), size)]
    for cut in range(1, len(text)):
        yield [text[:cut], text[cut:]]
