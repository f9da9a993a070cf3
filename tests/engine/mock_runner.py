"""A device of numpy-free Python: pages are real arrays of token ids, and the next token is a hash of the prefix read through the tables.

Wrong page accounting therefore shows as wrong tokens.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import numpy as np

from jaxllm.core_types import CacheGroup, CacheKind, CacheSpec, NewRow, RowResult, SchedulerOutput, StepResult, TokenLogprobs

VOCAB = 50


def next_token(prefix: Sequence[int], vocab: int = VOCAB) -> int:
    return zlib.crc32(bytes(str(list(prefix)), "ascii")) % vocab


def alone(prompt: Sequence[int], count: int, *, vocab: int = VOCAB) -> list[int]:
    """What a request gets from the mock model when nothing else runs."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, vocab))
    return tokens[len(prompt) :]


def cache_spec(
    page_size: int = 4,
    num_pages: int = 33,
    windows: Sequence[tuple[int, int]] = (),
    full: bool = True,
    states: tuple[int, int] | None = None,
    encoder: tuple[int, int] | None = None,
) -> CacheSpec:
    """A full group of `num_pages` (unless full=False), one window group for each (window, num_pages), a recurrent one where `states` is
    (interval, num_pages), and an encoder's where `encoder` is (longest input, num_pages).
    """
    groups = [CacheGroup(CacheKind.FULL, (0,), num_pages)] if full else []
    groups += [CacheGroup(CacheKind.SLIDING_WINDOW, (i + 1,), pages, window) for i, (window, pages) in enumerate(windows)]
    if states is not None:
        groups.append(CacheGroup(CacheKind.RECURRENT, (len(groups) + 1,), states[1], interval=states[0]))
    if encoder is not None:
        groups.append(CacheGroup(CacheKind.ENCODER, (len(groups) + 1,), encoder[1], encoder[0]))
    return CacheSpec(page_size, tuple(groups))


class AccountingError(BaseException):
    """The scheduler told the device nonsense. Not an Exception: the engine must not take it for a failed step and go on."""


class _Slot:
    def __init__(self, row: NewRow):
        self.row = row
        self.tokens = list(row.token_ids)
        self.table = [list(pages) for pages in row.page_ids]
        self.bans: set[int] = set()
        # Ids that the step at hand allows, ascending; None for all.
        self.allowed: list[int] | None = None
        # By recurrent group: what the state has seen after the step at hand.
        self.seen: dict[int, list[int]] = {}


class _Handle:
    def __init__(self, runner: MockRunner, step: SchedulerOutput):
        self.runner, self.step = runner, step
        self.computed: StepResult | Exception | None = None
        self.masks: dict[int, np.ndarray] = {}

    def sample(self, masks: dict[int, np.ndarray]) -> None:
        assert self.computed is None, "sampled behind the results"
        assert not self.masks, "sampled twice"
        assert set(masks) <= {row.slot for row in self.step.rows if row.waits}
        self.masks = masks

    def compute(self) -> None:
        try:
            self.runner.fail_compute(self.step)
        except Exception as error:
            self.computed = error
            # What was enqueued behind it builds on what it would have left on the device.
            for other in self.runner.queue:
                other.computed = RuntimeError("a step before this one failed")
            self.runner.queue.clear()
        else:
            try:
                self.computed = self.runner.compute(self.step, self.masks)
            except Exception as error:
                raise AccountingError from error

    def result(self) -> StepResult:
        while self.runner.queue and self.computed is None:
            self.runner.queue.pop(0).compute()
        assert self.computed is not None
        if isinstance(self.computed, Exception):
            raise self.computed
        return self.computed


class MockRunner:
    """Executes steps in order, as late as their results are asked for.

    Args:
        spec: the page pools.
        model: next token of a prefix.
        fail_execute: called with each step; may raise as a broken batch build would.
        fail_compute: called with each step; may raise as a broken device would.
        row_error: error text for a request id, or None.
    """

    def __init__(
        self,
        spec: CacheSpec,
        *,
        model: Callable[[Sequence[int]], int] = next_token,
        fail_execute: Callable[[SchedulerOutput], None] = lambda step: None,
        fail_compute: Callable[[SchedulerOutput], None] = lambda step: None,
        row_error: Callable[[str, list[int]], str | None] = lambda request_id, tokens: None,
    ):
        self.cache_spec = spec
        self.model, self.fail_execute, self.fail_compute, self.row_error = model, fail_execute, fail_compute, row_error
        # pages[g][page id] = token id at each position of the page, and how many tokens came before it in its sequence; the page of a
        # recurrent group is in `states`, all the tokens that the state has seen.
        self.states: dict[tuple[int, int], list[int]] = {}
        self.pages: list[list[list[tuple[int, int] | None]]] = [
            [[None] * spec.page_size for _ in range(group.num_pages)] for group in spec.groups
        ]
        self.slots: dict[int, _Slot] = {}
        self.queue: list[_Handle] = []
        self.num_tokens = 0
        self.num_steps = 0
        self.max_tokens_per_step = 0
        self.stopped = False

    def execute(self, step: SchedulerOutput) -> _Handle:
        self.fail_execute(step)
        handle = _Handle(self, step)
        self.queue.append(handle)
        return handle

    def shutdown(self) -> None:
        self.stopped = True

    def compute(self, step: SchedulerOutput, masks: dict[int, np.ndarray]) -> StepResult:
        self.num_steps += 1
        self.num_tokens += step.num_tokens
        self.max_tokens_per_step = max(self.max_tokens_per_step, step.num_tokens)
        for new in step.new_rows:
            self.slots[new.slot] = _Slot(new)
        for index, bans in step.banned_token_ids.items():
            self.slots[index].bans = set(bans)
        for slot in self.slots.values():
            slot.allowed = None
        for index, mask in masks.items():
            self.slots[index].allowed = [32 * i + bit for i, word in enumerate(mask.tolist()) for bit in range(32) if word >> bit & 1]
        assert len({row.slot for row in step.rows}) == len(step.rows), "a slot twice in a step"
        assert [row.num_tokens > 1 for row in step.rows] == sorted(row.num_tokens > 1 for row in step.rows), "single tokens come first"
        new_slots = {new.slot for new in step.new_rows}
        for row in step.rows:
            slot = self.slots[row.slot]
            for g, pages in enumerate(row.new_page_ids):
                assert not (pages and row.slot in new_slots)
                slot.table[g].extend(pages)
        reads = [self._read_states(self.slots[row.slot], row.start, row.num_tokens) for row in step.rows]
        writes = [self._write(self.slots[row.slot], row.start, row.num_tokens) for row in step.rows]
        for i, read in enumerate(reads):
            assert not read & set().union(*writes[:i], *writes[i + 1 :]), "a state that another row of the step writes"
        # Reading only after all writes of the step: a page shared wrongly has been overwritten by now.
        return StepResult([self._read(self.slots[row.slot], row) for row in step.rows], num_padded_tokens=step.num_tokens)

    def _read_states(self, slot: _Slot, start: int, count: int) -> set[tuple[int, int]]:
        """Returns the pages, with their groups, that the row starts from."""
        read = set()
        for g, group in enumerate(self.cache_spec.groups):
            if group.interval is not None:
                before = []
                if start:
                    read.add((g, slot.table[g][(start - 1) // group.interval]))
                    before = self.states[g, slot.table[g][(start - 1) // group.interval]]
                slot.seen[g] = before + slot.tokens[start : start + count]
        return read

    def _write(self, slot: _Slot, start: int, count: int) -> set[tuple[int, int]]:
        """Returns the state pages, with their groups, that the row leaves."""
        size = self.cache_spec.page_size
        written = set()
        for g, seen in slot.seen.items():
            group = self.cache_spec.groups[g]
            assert group.interval is not None
            entry = start // group.interval
            assert (start + count - 1) // group.interval == entry, "a step across a snapshot"
            page = slot.table[g][entry]
            assert 0 < page < group.num_pages, f"write to state page {page}"
            self.states[g, page] = seen
            written.add((g, page))
        for position in range(start, start + count):
            for g, group in enumerate(self.cache_spec.groups):
                if group.interval is not None:
                    continue
                page = slot.table[g][position // size]
                assert 0 < page < group.num_pages, f"write to page {page}"
                self.pages[g][page][position % size] = (position, slot.tokens[position])
        return written

    def _prefix(self, slot: _Slot, end: int) -> list[int]:
        """The tokens before `end`, each group's share read through its table."""
        size = self.cache_spec.page_size
        prefix = slot.tokens[:end]
        for g, group in enumerate(self.cache_spec.groups):
            if group.interval is not None:
                if slot.seen[g][:end] != slot.tokens[:end]:
                    prefix = [-1] * end
                continue
            first = 0 if group.window is None else max(0, end - group.window)
            for position in range(first, end):
                page = slot.table[g][position // size]
                assert 0 < page < group.num_pages, f"read of page {page} at position {position} of {end}"
                found = self.pages[g][page][position % size]
                assert found is not None, f"position {position} was never written"
                # A wrong position counts too: keys carry their position.
                prefix[position] = found[1] if found[0] == position else -1
        return prefix

    def _read(self, slot: _Slot, row) -> RowResult:
        end = row.start + row.num_tokens
        error = self.row_error(slot.row.request_id, slot.tokens[:end])
        if error is not None:
            if row.samples:
                slot.tokens.append(0)  # what an argmax over NaNs gives
            return RowResult(error=error)
        prompt_logprobs = None
        if slot.row.sampling_params.prompt_logprobs is not None:
            last = min(end, slot.row.prompt_len - 1)
            prompt_logprobs = [
                TokenLogprobs([slot.tokens[position + 1]], [-float(self.model(self._prefix(slot, position + 1)))], 1)
                for position in range(row.start, last)
            ]
        if not row.samples:
            return RowResult(prompt_logprobs=prompt_logprobs)
        if row.waits and slot.allowed is None:
            # Nothing may come: its request has ended.
            return RowResult(prompt_logprobs=prompt_logprobs)
        token = self.model(self._prefix(slot, end))
        while token in slot.bans:
            token = (token + 1) % VOCAB
        assert row.waits or slot.row.sampling_params.output_grammar is None, "a mask with every token of a grammar"
        if slot.allowed is not None:
            token = slot.allowed[token % len(slot.allowed)]
        assert len(slot.tokens) == end, "sampling somewhere else than at the end"
        slot.tokens.append(token)
        logprobs = None
        if slot.row.sampling_params.logprobs is not None:
            logprobs = TokenLogprobs([token], [-0.5], 1)
        return RowResult(token_id=token, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
