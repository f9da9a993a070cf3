"""Reasoning that may take so many tokens: once they are used up, what ends it is all that may come."""

from __future__ import annotations

import codecs
from collections.abc import Callable

from jaxllm.sampling_params import SamplingParams

_LONGEST_CHARACTER = 4


class ThinkingBudget:
    """How far a request's reasoning has come. Kept on the request, so that it outlives preemption.

    Marks are looked for in the bytes of the output: the same text can be made of different tokens.

    Args:
        params: with `thinking_token_budget` and `reasoning_marks`.
        token_bytes: the bytes of a token.
    """

    def __init__(self, params: SamplingParams, token_bytes: Callable[[int], bytes]):
        marks = params.reasoning_marks
        assert marks is not None
        assert params.thinking_token_budget is not None
        self._starts = [mark.encode() for mark in marks.starts]
        self._ends = [mark.encode() for mark in (*marks.ends, *marks.implied_ends)]
        self._keep = max(map(len, self._starts + self._ends)) - 1
        self._anywhere = marks.anywhere
        self._closing = marks.closing_ids
        self._left = params.thinking_token_budget
        self._pending: list[int] = []
        self._tail = b""
        self._token_bytes = token_bytes
        self.is_inside = marks.is_open
        self._is_over = False

    def is_due(self, num_in_flight: int) -> bool:
        """Whether the token behind those in flight may be one that is forced."""
        return bool(self._pending) or (not self._is_over and self._left <= num_in_flight)

    @property
    def forced(self) -> int | None:
        """The only token that may come next; None where any may."""
        # A character that was begun may still be finished: no grammar could go on behind a part of it.
        may_wait = self._left > -_LONGEST_CHARACTER and _ends_inside_character(self._tail)
        if not self._pending and self.is_inside and self._left <= 0 and not may_wait:
            self._pending = list(self._closing)
        return self._pending[0] if self._pending else None

    def accept(self, token_id: int) -> None:
        """Follow a token of the output."""
        if self._is_over:
            return
        was_inside, is_closing = self.is_inside, bool(self._pending)
        if is_closing:
            self._pending.pop(0)
        self._tail += self._token_bytes(token_id)
        if was_inside:
            self._left -= not is_closing
            if self._find(self._ends) or (is_closing and not self._pending):
                self.is_inside, self._is_over = False, not self._anywhere
        elif self._anywhere:
            self.is_inside = self._find(self._starts)
        else:
            text = self._tail.lstrip()
            self.is_inside = any(text.startswith(start) for start in self._starts)
            self._is_over = not self.is_inside and not any(start.startswith(text) for start in self._starts)
        if self.is_inside or self._anywhere:
            self._tail = self._tail[-self._keep :] if self._keep else b""

    def _find(self, marks: list[bytes]) -> bool:
        """Whether one of the marks is there; nothing of it can belong to another."""
        end = max((self._tail.rfind(mark) + len(mark) for mark in marks if mark in self._tail), default=-1)
        if end >= 0:
            self._tail = self._tail[end:]
        return end >= 0


def _ends_inside_character(text: bytes) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(text[-_LONGEST_CHARACTER:])
    return bool(decoder.getstate()[0])
