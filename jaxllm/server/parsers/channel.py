"""The text of one part of an answer on its way out."""

from __future__ import annotations

from collections.abc import Callable


class Channel:
    """Passes text on at once, but for white space that may not belong to it.

    White space behind a marker is dropped (`at_marker`); that before one, and any at the end, waits (`hold_space`) until text follows.
    """

    def __init__(self, emit: Callable[[str], None], *, hold_space: bool):
        self._emit = emit
        self._hold_space = hold_space
        self._drop_leading = False
        self._held: list[str] = []
        # Whether text came already, and whether more is being read now.
        self.begun = False
        self.active = False

    def at_marker(self) -> None:
        """The text so far and the text to come touch a marker here."""
        if not self.begun:
            self._held.clear()
        self._drop_leading = True

    def write(self, text: str) -> None:
        if self._drop_leading:
            text = text.lstrip()
        if not text:
            return
        self._drop_leading = False
        if self._hold_space:
            body = text.rstrip()
            space = text[len(body) :]
            if not body:
                self._held.append(space)
                return
            text = "".join(self._held) + body
            self._held = [space] if space else []
        self.begun = self.begun or not text.isspace()
        self._emit(text)

    def flush(self) -> None:
        """The text ends: what waited belongs to it, unless a marker follows."""
        if self._held and not self._drop_leading:
            self._emit("".join(self._held))
        self._held.clear()
