"""Tool calls while they are read: what the readers of all formats share."""

from __future__ import annotations

import re
from collections.abc import Callable

from jaxllm.server.parsers.events import ArgumentsDelta, Event, ToolCallStart
from jaxllm.server.parsers.json_writer import JsonWriter
from jaxllm.server.parsers.schema import ToolSchemas
from jaxllm.server.parsers.source import Malformed, Reading, Source, markers

_STRAY = re.compile(r"[\s}\]]*")
# More than the white space that grammars let stand there.
_MAX_STRAY = 128


class CallReader:
    """The calls of one answer.

    Text is read on trial until a call is certain (`start`): where the format breaks before, it goes back to the answer; where it breaks
    later, the call's arguments are completed, and the answer goes on behind them.
    """

    def __init__(self, source: Source, schemas: ToolSchemas, emit: Callable[[Event], None], *, known_names_only: bool):
        self.source = source
        self.schemas = schemas
        self.count = 0
        self.writer = JsonWriter()
        self.name = ""
        self._emit = emit
        self._ids: set[str] = set()
        self._known_names_only = known_names_only and schemas.given
        self._running = False

    def new_arguments(self) -> JsonWriter:
        """A writer for the arguments of a call that may come; they wait in it until the call starts."""
        self.writer = JsonWriter()
        return self.writer

    def start(self, name: str, call_id: str | None = None) -> None:
        """The call is certain.

        Raises:
            Malformed: it is none, because no tool has this name and the format wants one.
        """
        if self._known_names_only and name not in self.schemas:
            raise Malformed
        self.source.end_trial()
        if not call_id or call_id in self._ids:
            call_id = None
        else:
            self._ids.add(call_id)
        self._emit(ToolCallStart(self.count, name, call_id))
        self.count += 1
        self.name = name
        self._running = True

    @property
    def running(self) -> bool:
        return self._running

    def pump(self) -> None:
        """Report the arguments written so far of the call that runs."""
        if self._running and self.writer.pieces:
            self._emit(ArgumentsDelta(self.count - 1, self.writer.drain()))

    def end(self) -> None:
        """The call that runs, if one does, has all its arguments."""
        if self._running:
            if not self.writer.done:
                self.writer.complete()
            self.pump()
            self._running = False

    def give_up(self) -> None:
        """The format broke: the arguments of the call that runs are completed, unless it is a limit that cut the text here."""
        cut = self.source.ended and self.source.pos >= len(self.source.text)
        if cut and self.source.truncated:
            self.pump()
        else:
            self.end()

    def close(self, closes: tuple[str, ...]) -> Reading[None]:
        """Read the end of a section, with brackets too many before it; where there is none, nothing is lost.

        Raises:
            Malformed: the section has no end here.
        """
        if not closes:
            return
        self.source.begin_trial()
        yield from self.source.run(_STRAY, _MAX_STRAY)
        if (yield from self.source.match(markers(*closes))) is None:
            raise Malformed
        self.source.end_trial()
