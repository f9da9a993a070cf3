"""One generated sequence as text: incremental decoding and stop strings.

A stop string must never be seen, not even its first characters. What is held back is exactly the longest end of the text that could
still grow into a stop string; everything before it can be given out at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxllm.sampling_params import SamplingParams
from jaxllm.text.tokenizer import TextStream, Tokenizer


class IncrementalDetokenizer:
    """Text of one sequence, fed with token ids as they come, several at a time or one by one: the result is the same.

    Args:
        tokenizer: None where `params.detokenize` is false; the text stays empty then.
        prompt_token_ids: what the sequence follows; its last ids prime the decoder.
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt_token_ids: Sequence[int], params: SamplingParams):
        # Every id that counts as output, the one that completed a stop string or is a stop token included.
        self.token_ids: list[int] = []
        self._stops = _StopStrings(list(params.stop or ()), include=params.include_stop_str_in_output)
        self._min_tokens = params.min_tokens
        self._include_stop = params.include_stop_str_in_output
        self._stream: TextStream | None = None
        # Tokens that get no space between them where two follow each other.
        self._joined_tokens: Mapping[int, str] = {}
        if params.detokenize and tokenizer is not None:
            self._stream = tokenizer.decode_stream(prompt_token_ids, skip_special_tokens=params.skip_special_tokens)
            if not (params.skip_special_tokens or params.spaces_between_special_tokens):
                self._joined_tokens = tokenizer.added_tokens
        self._last_was_added = False
        self._unsent: list[str] = []
        self._held = 0
        self._stopped = False

    def update(self, new_token_ids: Sequence[int], *, stop_terminated: bool = False) -> str | None:
        """Append what was generated; returns the stop string that it completes, or None.

        Ids behind the one that completes a stop string are dropped. `stop_terminated` says that the last id is a stop or
        end-of-sequence token: it counts as output, and its text is left out unless include_stop_str_in_output is set.
        """
        if self._stopped:
            return None
        silent = len(new_token_ids) - 1 if stop_terminated and not self._include_stop else -1
        for i, token_id in enumerate(new_token_ids):
            self.token_ids.append(token_id)
            if i == silent or self._stream is None:
                continue
            stop = self._add(self._decode(token_id))
            if stop is not None:
                return stop
        return None

    def next_delta(self, finished: bool) -> str:
        """The text that came since the last call and can be given out; with `finished`, all of it."""
        if finished:
            self._release()
        text = "".join(self._unsent)
        visible = len(text) - self._held
        self._unsent = [text[visible:]] if self._held else []
        return text[:visible]

    def _decode(self, token_id: int) -> str:
        assert self._stream is not None
        text = self._stream.step(token_id)
        if self._joined_tokens:
            added = self._joined_tokens.get(token_id)
            if added is not None and self._last_was_added:
                text = added
            self._last_was_added = added is not None
        return text

    def _add(self, new: str) -> str | None:
        """Append text; where it completes a stop string, cut there and return that string."""
        if not new:
            return None
        self._unsent.append(new)
        if not self._stops:
            return None
        match = self._stops.feed(new, armed=len(self.token_ids) > self._min_tokens)
        self._held = self._stops.held
        if match is None:
            return None
        stop, excess = match
        if excess:
            text = "".join(self._unsent)
            self._unsent = [text[: len(text) - excess]]
        self._stopped, self._held = True, 0
        return stop

    def _release(self) -> None:
        """No more tokens will come: give out unfinished characters, and what was held back for a stop string that never came."""
        if not self._stopped and self._stream is not None:
            self._add(self._stream.flush())
        self._stopped, self._held = True, 0


class _StopStrings:
    """Looks for the first of several strings in a growing text, in time independent of the text's length."""

    def __init__(self, stops: list[str], *, include: bool):
        self._stops = stops
        self._include = include
        self._reach = max(map(len, stops), default=0) - 1
        # The end of the text: as much as a match that is not complete yet can reach back.
        self._tail = ""
        # Characters at the end of the text that must not be given out yet.
        self.held = 0

    def __bool__(self) -> bool:
        return bool(self._stops)

    def feed(self, new: str, *, armed: bool) -> tuple[str, int] | None:
        """Append `new`. Returns (the stop string completed first, characters to cut off the end), or None.

        Not `armed` (min_tokens not passed yet), no match may end in `new`, but one that begins there may end later.
        """
        text = self._tail + new
        match = self._first(text, len(text) - len(new)) if armed else None
        self._tail = text[max(0, len(text) - self._reach) :] if self._reach > 0 else ""
        self.held = 0 if self._include else self._unfinished(self._tail)
        if match is None:
            return None
        end, stop = match
        return stop, len(text) - (end if self._include else end - len(stop))

    def _first(self, text: str, seen: int) -> tuple[int, str] | None:
        """The match that ends first, behind position `seen`; of several with one end, the one named first."""
        best: tuple[int, str] | None = None
        for stop in self._stops:
            at = text.find(stop, max(0, seen - len(stop) + 1))
            if at >= 0 and (best is None or at + len(stop) < best[0]):
                best = (at + len(stop), stop)
        return best

    def _unfinished(self, tail: str) -> int:
        """Length of the longest end of `tail` that is the beginning, and not the whole, of a stop string."""
        longest = 0
        for stop in self._stops:
            end = min(len(stop) - 1, len(tail))
            while end > longest and (last := stop.rfind(tail[-1], 0, end)) >= longest:
                if tail.endswith(stop[: last + 1]):
                    longest = last + 1
                    break
                end = last
        return longest
