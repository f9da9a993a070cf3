"""JSON written piece by piece, complete at any moment on demand."""

from __future__ import annotations

import json
from typing import Any

_END = {"{": "}", "[": "]"}


def encoded(value: Any) -> str:
    """JSON of a value.

    Raises:
        ValueError: a number in it is infinite or none.
    """
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def encoded_inside(text: str) -> str:
    """Text as it stands between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class JsonWriter:
    """Collects the text of one JSON value. What was not drained yet waits in `pieces`."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self._open: list[str] = []
        self._empty = True  # nothing written yet in the innermost open value
        self._keyed = False  # a key waits for its value
        self._in_string = False
        self._begun = False

    @property
    def depth(self) -> int:
        return len(self._open)

    @property
    def innermost(self) -> str:
        """The bracket of the innermost open value; empty outside of all."""
        return self._open[-1] if self._open else ""

    @property
    def done(self) -> bool:
        return self._begun and not self._open and not self._in_string

    def drain(self) -> str:
        """What was written since the last call."""
        text = "".join(self.pieces)
        self.pieces.clear()
        return text

    def open(self, bracket: str) -> None:
        self._before_value()
        self.pieces.append(bracket)
        self._open.append(bracket)
        self._empty = True

    def close(self) -> None:
        self.pieces.append(_END[self._open.pop()])
        self._empty = False

    def key(self, name: str) -> None:
        self.pieces.append(("" if self._empty else ", ") + encoded(name) + ": ")
        self._empty = False
        self._keyed = True

    def value(self, text: str) -> None:
        """A whole value, given as JSON."""
        self._before_value()
        self.pieces.append(text)

    def open_string(self) -> None:
        self._before_value()
        self.pieces.append('"')
        self._in_string = True

    def string_piece(self, inside: str) -> None:
        self.pieces.append(inside)

    def close_string(self) -> None:
        self.pieces.append('"')
        self._in_string = False

    def complete(self) -> None:
        """Close whatever is open, so that all that was written is one JSON value; an object where nothing was."""
        if not self._begun:
            self.open("{")
        if self._in_string:
            self.close_string()
        if self._keyed:
            self.value("null")
        while self._open:
            self.close()

    def _before_value(self) -> None:
        if self._open and not self._keyed and not self._empty:
            self.pieces.append(", ")
        self._begun = True
        self._empty = self._keyed = False
