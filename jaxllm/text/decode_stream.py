"""Token ids to text, one id at a time: what is given out is never taken back, and characters come whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

REPLACEMENT = "\ufffd"
# Ids of context that a stream is primed with: enough for decoders that treat the start of a text differently, and for whole characters.
_PRIMING = 12
# A character has at most four bytes, so of the ids that gave no text yet only the last three can still belong to an unfinished one.
_UNFINISHED = 3
_MOST_PENDING = 8


class TextStream:
    """Decodes a growing sequence, given what came before it.

    It is `tokenizers`' DecodeStream, kept linear: that stream waits for as long as its text ends in U+FFFD, decoding everything it
    holds at each step. Here at most `_MOST_PENDING` ids wait; then those that no later id can complete are given out as they are.
    """

    def __init__(self, backend: Backend, context_ids: Sequence[int] = (), *, skip_special_tokens: bool = True):
        self._backend = backend
        self._skip = skip_special_tokens
        # The ids that gave the last text, whole characters all of them; `_pending` came later and gave none yet.
        self._context, self._pending = self._split_context(list(context_ids[-_PRIMING:]))
        self._restart()
        # Until an id comes, what is pending is the prompt's and no text of ours.
        self._fed = False

    def step(self, token_id: int) -> str:
        """The text that `token_id` completes, "" where it completes none."""
        self._fed = True
        self._pending.append(token_id)
        try:
            text = self._stream.step(self._backend, token_id)
        except Exception:
            # The decoder rewrote text that was already given out (tokenizers' "Invalid prefix"): go on from here.
            return self._give_out(len(self._pending))
        if text is not None:
            self._context, self._pending = self._pending, []
            return text
        if len(self._pending) > _MOST_PENDING:
            return self._give_out(len(self._pending) - _UNFINISHED)
        return ""

    def flush(self) -> str:
        """The text of the ids that still wait, U+FFFD for bytes that make no character. The stream can go on afterwards."""
        return self._give_out(len(self._pending)) if self._pending and self._fed else ""

    def _split_context(self, ids: list[int]) -> tuple[list[int], list[int]]:
        """(whole characters, the ids of a last one that is unfinished: what follows completes it)."""
        loosely = None
        for end in range(len(ids), max(0, len(ids) - _UNFINISHED) - 1, -1):
            # `ids` may also begin within a character.
            for start in range(min(_UNFINISHED, max(0, end - 1)) + 1):
                text = self._decode(ids[start:end])
                if REPLACEMENT not in text:
                    return ids[start:end], ids[end:]
                if loosely is None and not text.endswith(REPLACEMENT):
                    loosely = ids[start:end], ids[end:]
        return loosely or (ids, [])

    def _restart(self) -> str:
        """A new stream behind `_context`, fed with what is pending; the text that this gave, normally none."""
        from tokenizers.decoders import DecodeStream

        # A context that decodes to a trailing U+FFFD would be given out again by the stream.
        usable = not self._decode(self._context).endswith(REPLACEMENT)
        self._stream = DecodeStream(self._context if usable else [], skip_special_tokens=self._skip)
        waiting, self._pending = self._pending, []
        return "".join([self.step(token_id) for token_id in waiting])

    def _give_out(self, count: int) -> str:
        """Decode the first `count` pending ids as they are, and start again behind them."""
        done, self._pending = self._pending[:count], self._pending[count:]
        before, after = self._decode(self._context), self._decode(self._context + done)
        text = after[len(before) :] if after.startswith(before) else self._decode(done)
        if text and not text.endswith(REPLACEMENT):
            self._context = done
        return text + self._restart()

    def _decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=self._skip)
