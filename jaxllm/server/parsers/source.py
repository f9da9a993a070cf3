"""Text that arrives in pieces, read by generators that pause until they can decide.

A reader decides only when no further text could change its mind, so what it reads cannot depend on how the text was cut.
A reader pauses with a bare `yield`; whoever feeds the source resumes it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator, Iterable
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
# A computation that pauses for more text and returns T.
Reading = Generator[None, None, T]

_SPACE = re.compile(r"\s*")


class Malformed(Exception):
    """The text ahead cannot be what the format asks for."""


class Markers:
    """Literal words to be found in text; of two at the same place the longer one counts."""

    def __init__(self, words: Iterable[str]):
        self.words = tuple(sorted({word for word in words if word}, key=lambda word: (-len(word), word)))
        self.regex = re.compile("|".join(map(re.escape, self.words)) if self.words else r"(?!)")
        self._longest = max(map(len, self.words), default=0)
        self._initials = frozenset(word[0] for word in self.words)

    def may_begin(self, text: str, start: int) -> bool:
        """Whether all of text[start:] is the beginning of a word, and more of it is to come."""
        size = len(text) - start
        return size < self._longest and any(len(word) > size and word.startswith(text[start:]) for word in self.words)

    def held_from(self, text: str, start: int) -> int:
        """Where in text[start:] its end begins to look like the beginning of a word; len(text) where it does not."""
        size = len(text)
        for index in range(max(start, size - self._longest + 1), size):
            if text[index] in self._initials and self.may_begin(text, index):
                return index
        return size


@lru_cache(maxsize=1024)
def markers(*words: str) -> Markers:
    return Markers(words)


class Source:
    """The text fed so far that was not read yet; reading moves on for good, except that a trial's text can be had again."""

    def __init__(self) -> None:
        self.text = ""
        self.pos = 0
        self.ended = False
        # The end is a limit's, not the model's.
        self.truncated = False
        self._trial: list[str] | None = None

    def feed(self, text: str) -> None:
        self.text = self.text[self.pos :] + text
        self.pos = 0

    def take(self, size: int) -> str:
        """Read `size` characters that are there."""
        piece = self.text[self.pos : self.pos + size]
        self.pos += size
        if self._trial is not None:
            self._trial.append(piece)
        return piece

    def begin_trial(self) -> None:
        """Remember what is read from here on."""
        self._trial = []

    def end_trial(self) -> str:
        """What was read since the trial began; empty without a trial."""
        read = "".join(self._trial or ())
        self._trial = None
        return read

    def available(self, size: int) -> Reading[bool]:
        """Wait for `size` unread characters; False where the text ends before."""
        while len(self.text) - self.pos < size:
            if self.ended:
                return False
            yield
        return True

    def peek(self) -> Reading[str]:
        """The next character, not read; empty at the end."""
        yield from self.available(1)
        return self.text[self.pos : self.pos + 1]

    def space(self) -> Reading[str]:
        """Read white space up to something else or the end."""
        read = []
        while True:
            found = _SPACE.match(self.text, self.pos)
            assert found is not None
            if found.end() > self.pos:
                read.append(self.take(found.end() - self.pos))
            if self.pos < len(self.text) or self.ended:
                return "".join(read)
            yield

    def comes(self, words: Markers, *, behind_space: int = 0) -> Reading[bool | None]:
        """Whether one of the words comes next, behind at most so much white space; None where the text ends before that is clear.
        Nothing is read.
        """
        while True:
            found = _SPACE.match(self.text, self.pos) if behind_space else None
            start = found.end() if found else self.pos
            if start - self.pos > behind_space:
                return False
            if not words.may_begin(self.text, start):
                return words.regex.match(self.text, start) is not None
            if self.ended:
                return None
            yield

    def match(self, words: Markers) -> Reading[str | None]:
        """Read the longest of the words that comes next; None where none does."""
        yield from self.comes(words)
        found = words.regex.match(self.text, self.pos)
        return self.take(found.end() - found.start()) if found and found.end() > found.start() else None

    def expect(self, word: str) -> Reading[None]:
        if (yield from self.match(markers(word))) is None:
            raise Malformed

    def until(
        self, words: Markers, emit: Callable[[str], None], keep: Collection[str] = (), limit: int | None = None
    ) -> Reading[str | None]:
        """Hand the text before the next of the words to `emit`, as soon as it is sure; read the word, unless it is one to keep.

        Returns the word, or None at the end of the text.

        Raises:
            Malformed: more than `limit` characters before a word.
        """
        size = 0
        while True:
            text = self.text
            found = words.regex.search(text, self.pos)
            stop = len(text) if self.ended else words.held_from(text, self.pos)
            # A word that may still become a longer one, or that begins behind the beginning of another, waits.
            decided = found is not None and (found.start() < stop or self.ended)
            if found is not None:
                stop = min(stop, found.start())
            size += stop - self.pos
            if limit is not None and size > limit:
                raise Malformed
            if stop > self.pos:
                emit(self.take(stop - self.pos))
            if found is not None and decided:
                word = found.group()
                if word not in keep:
                    self.take(len(word))
                return word
            if self.ended:
                return None
            yield

    def run(self, characters: re.Pattern[str], limit: int) -> Reading[str]:
        """Read the longest run of characters that the pattern (a repeated class) matches, once its end is seen.

        Raises:
            Malformed: the run is longer than `limit`.
        """
        while True:
            found = characters.match(self.text, self.pos)
            end = found.end() if found else self.pos
            if end - self.pos > limit:
                raise Malformed
            if end < len(self.text) or self.ended:
                return self.take(end - self.pos)
            yield
