"""One parser of model output for all formats: answer, reasoning and tool calls, while the text comes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from jaxllm.server.parsers.calls import CallReader
from jaxllm.server.parsers.channel import Channel
from jaxllm.server.parsers.events import ContentDelta, Event, ReasoningDelta, ToolCallStart
from jaxllm.server.parsers.formats import HarmonyCalls, HeaderCalls, JsonCalls, PythonCalls, ReasoningFormat, TaggedCalls, ToolFormat
from jaxllm.server.parsers.harmony import read_harmony
from jaxllm.server.parsers.header_calls import read_header_calls
from jaxllm.server.parsers.json_calls import read_json_calls
from jaxllm.server.parsers.python_calls import read_python_calls
from jaxllm.server.parsers.schema import ToolSchemas
from jaxllm.server.parsers.source import Malformed, Markers, Reading, Source, markers
from jaxllm.server.parsers.tagged_calls import read_tagged_calls

HARMONY_REASONING = "openai_gptoss"
_READERS: dict[type[ToolFormat], Callable[[CallReader, Any], Reading[None]]] = {
    JsonCalls: read_json_calls,
    HeaderCalls: read_header_calls,
    TaggedCalls: read_tagged_calls,
    PythonCalls: read_python_calls,
}


class OutputParser:
    """Takes a model's output apart while it comes.

    Args:
        tools: how tool calls are written; None leaves them in the answer.
        reasoning: how reasoning is shown; None leaves it in the answer.
        schemas: the request's tools, for the types of their arguments.
        starts_in_reasoning: whether the prompt ends inside of reasoning; None: what the format makes likely.

    What comes out does not depend on how the text is cut: `feed(a + b)` reports the same text as `feed(a)` and `feed(b)`.
    Output that breaks its format is never an error; it goes to the answer.
    """

    def __init__(
        self,
        tools: ToolFormat | None = None,
        reasoning: ReasoningFormat | None = None,
        *,
        schemas: Iterable[Mapping[str, Any]] | None = None,
        starts_in_reasoning: bool | None = None,
    ):
        self._tools = tools
        self._reasoning_format = reasoning
        self._source = Source()
        self._events: list[Event] = []
        self._finished = False
        self._reasoning_is_over = False
        self._starts_in_reasoning = starts_in_reasoning
        strip = reasoning is not None and reasoning.strip
        self._content = Channel(
            lambda text: self._emit(ContentDelta(text)),
            hold_space=tools is not None or (reasoning is not None and reasoning.wrapper is not None),
        )
        self._reasoning = Channel(lambda text: self._emit(ReasoningDelta(text)), hold_space=strip)
        known = tools is not None and tools.known_names_only
        self._calls = CallReader(self._source, ToolSchemas(schemas), self._emit, known_names_only=known)
        harmony = isinstance(tools, HarmonyCalls) or (reasoning is not None and reasoning.name == HARMONY_REASONING)
        self._reading = self._harmony() if harmony else self._answer()
        self._resume()

    @property
    def in_reasoning(self) -> bool:
        """Whether the text so far ends inside of reasoning."""
        return self._reasoning.active

    @property
    def reasoning_is_over(self) -> bool:
        """Whether no reasoning can follow, so that all the rest is answer."""
        return self._reasoning_is_over and not self.in_reasoning

    def feed(self, text: str) -> list[Event]:
        """What is certain with this further text."""
        if text:
            self._source.feed(text)
            self._resume()
        return self._drain()

    def finish(self, *, truncated: bool = False) -> list[Event]:
        """What was held back, at the end of the output. Arguments that were not finished are completed, unless a limit cut them off."""
        if not self._finished:
            self._finished = self._source.ended = True
            self._source.truncated = truncated
            self._resume()
            self._content.flush()
        return self._drain()

    # ------------------------------------------------------------------------------------------------------------ inside

    def _resume(self) -> None:
        next(self._reading, None)
        self._calls.pump()

    def _drain(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _emit(self, event: Event) -> None:
        """Report an event; text that goes on joins what was not handed out yet."""
        last = self._events[-1] if self._events else None
        if last is None or isinstance(event, ToolCallStart) or isinstance(last, ToolCallStart) or replace(last, text=event.text) != event:
            self._events.append(event)
        else:
            self._events[-1] = replace(last, text=last.text + event.text)

    def _answer(self) -> Reading[None]:
        source, form = self._source, self._reasoning_format
        if form is not None:
            if form.kept_with:
                self._content.write(form.kept_with)
            space = yield from source.space()
            # Where the prompt opened reasoning, an opening of the model's own is part of it.
            opened = None if self._starts_in_reasoning else (yield from source.match(markers(*form.starts)))
            inside = form.implied if self._starts_in_reasoning is None else self._starts_in_reasoning
            if opened is not None or inside:
                yield from self._think("" if opened is not None else space)
            else:
                self._content.write(space)
        self._reasoning_is_over = form is None or not form.anywhere
        yield from self._say()

    def _think(self, begun_with: str = "") -> Reading[None]:
        """Read reasoning, whose beginning was read, and its end."""
        form = self._reasoning_format
        assert form is not None
        self._reasoning.active = True
        if form.strip:
            self._reasoning.at_marker()
        self._reasoning.write(begun_with)
        ends = markers(*form.ends, *form.implied_ends)
        yield from self._source.until(ends, self._reasoning.write, keep=form.implied_ends)
        self._reasoning.active = False
        if form.strip:
            self._content.at_marker()
            self._reasoning.at_marker()

    def _say(self) -> Reading[None]:
        """Read the answer with its calls, to the end."""
        source, tools, form = self._source, self._tools, self._reasoning_format
        silent = set(tools.silent if tools is not None else ())
        thoughts: frozenset[str] = frozenset()
        if form is not None and form.anywhere:
            thoughts = frozenset(form.starts)
            silent |= set(form.ends)
        silent |= yield from self._unwrap()
        sections = section_openings(tools)
        words = Markers((*sections, *thoughts, *silent))
        if tools is not None and tools.bare:
            self._content.write((yield from source.space()))
            char = yield from source.peek()
            if char and char in tools.bare:
                yield from self._section()
        while True:
            word = yield from source.until(words, self._content.write, keep=sections)
            if word is None:
                return
            if word in sections:
                yield from self._section()
            elif word in thoughts:
                yield from self._think()
            elif word not in self._stray:
                self._content.at_marker()

    @property
    def _stray(self) -> tuple[str, ...]:
        """Ends of reasoning that never began."""
        return self._reasoning_format.ends if self._reasoning_format is not None else ()

    def _unwrap(self) -> Reading[set[str]]:
        """Read the beginning of a wrapper around the answer, if there is one; returns what ends it."""
        wrapper = self._reasoning_format.wrapper if self._reasoning_format is not None else None
        if wrapper is None:
            return set()
        self._content.write((yield from self._source.space()))
        if (yield from self._source.match(markers(wrapper[0]))) is None:
            return set()
        self._content.at_marker()
        return {wrapper[1]}

    def _section(self) -> Reading[None]:
        """Read a section of calls; what breaks the format goes back to the answer."""
        calls = self._calls
        self._source.begin_trial()
        before = calls.count
        try:
            assert self._tools is not None
            yield from _READERS[type(self._tools)](calls, self._tools)
        except Malformed:
            calls.give_up()
        failed = self._source.end_trial()
        if calls.count > before:
            self._content.at_marker()
        self._content.write(failed)

    def _harmony(self) -> Reading[None]:
        yield from read_harmony(
            self._source, self._calls, self._content, self._reasoning, reads_calls=isinstance(self._tools, HarmonyCalls)
        )


def section_openings(tools: ToolFormat | None) -> frozenset[str]:
    """What may begin a section of calls."""
    if tools is None:
        return frozenset()
    return frozenset((*tools.opens, *tools.bare_anywhere, *(tools.call_opens if isinstance(tools, TaggedCalls) else ())))
