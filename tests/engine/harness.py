"""Helpers of the engine's tests: requests, a driver, and the books of the page pools."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from jaxllm.core_types import CacheSpec, EngineOutput, EngineRequest
from jaxllm.engine.core import EngineCore
from jaxllm.engine.scheduler import Scheduler
from jaxllm.sampling_params import SamplingParams
from tests.engine.mock_runner import MockRunner, cache_spec


def make_request(request_id: str, prompt: Sequence[int], *, max_tokens: int | None = 8, **fields: Any) -> EngineRequest:
    outer = {
        name: fields.pop(name) for name in ("priority", "cache_salt", "deadline", "arrival_time", "encoder_token_ids") if name in fields
    }
    outer.setdefault("arrival_time", time.time())
    params = SamplingParams(temperature=0, max_tokens=max_tokens, **fields)
    return EngineRequest(request_id=request_id, prompt_token_ids=list(prompt), sampling_params=params, **outer)


def make_core(
    spec: CacheSpec | None = None, *, overlapped: bool = True, runner: dict[str, Any] | None = None, **options: Any
) -> EngineCore:
    spec = spec or cache_spec()
    settings: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 100, **options}
    return EngineCore(Scheduler(spec, **settings), MockRunner(spec, **(runner or {})), async_scheduling=overlapped)


class Collected:
    """Everything that an engine said about its requests."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.last: dict[str, EngineOutput] = {}
        self.cached: dict[str, int | None] = {}
        self.prompt_logprobs: dict[str, list[float]] = {}

    def take(self, outputs: Iterable[EngineOutput]) -> None:
        for output in outputs:
            request_id = output.request_id
            assert request_id not in self.last, "an output after the last one"
            self.tokens.setdefault(request_id, []).extend(output.new_token_ids)
            if output.num_cached_tokens is not None:
                self.cached[request_id] = output.num_cached_tokens
            if output.prompt_logprobs is not None:
                assert request_id not in self.prompt_logprobs, "prompt logprobs are delivered once"
                self.prompt_logprobs[request_id] = [entry.logprobs[0] for entry in output.prompt_logprobs]
            if output.finish_reason is not None:
                self.last[request_id] = output

    def reason(self, request_id: str) -> str:
        return str(self.last[request_id].finish_reason)


def run(
    core: EngineCore, requests: Iterable[EngineRequest] = (), collected: Collected | None = None, max_steps: int = 100_000
) -> Collected:
    """Add the requests and step until nothing is left to do."""
    collected = collected or Collected()
    for request in requests:
        core.add_request(request)
    for _ in range(max_steps):
        if not core.has_work:
            return collected
        collected.take(core.step().outputs)
        check_books(core.scheduler)
    raise AssertionError(
        f"still working after {max_steps} steps: {core.scheduler.num_running} running, {core.scheduler.num_waiting} waiting"
    )


def check_books(scheduler: Scheduler) -> None:
    """Reference counts equal the tables, and the free list and the cache agree with them."""
    kv = scheduler.kv
    for g, group in enumerate(kv._all_groups):
        pool, cache = group.pool, group.cache
        held = Counter(page for request in scheduler._running for page in request.page_ids[g] if page)
        for page in range(1, pool.num_pages):
            assert pool.ref_count(page) == held[page], f"group {g} page {page}: {pool.ref_count(page)} references, {held[page]} in tables"
        free = [*pool._blank, *pool._kept]
        assert len(free) == len(set(free)) == pool.num_usable - len(held)
        assert all(pool.ref_count(page) == 0 for page in free)
        assert set(pool._kept) <= set(cache._hash_of) == {page for page in range(pool.num_pages) if pool._cached[page]}
        assert {page: h for h, page in cache._page_of.items()} == cache._hash_of
    slots = [request.slot for request in scheduler._running]
    assert sorted(slots + scheduler._free_slots) == list(range(scheduler.max_num_seqs))
    assert [request.key for request in scheduler._running] == sorted(request.key for request in scheduler._running)


def check_empty(scheduler: Scheduler) -> None:
    """Nothing is left of any request."""
    check_books(scheduler)
    assert scheduler.num_running == scheduler.num_waiting == 0
    assert not scheduler.has_work
    assert scheduler.kv.usage == 0.0
    assert not scheduler.kv._pending
    assert not scheduler._requests
    assert not scheduler._steps
    assert not scheduler._suspects
