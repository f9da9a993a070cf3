"""Pooling requests in the scheduler and the step loop: whole prompts, one answer each, and the ends that any request may come to."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

from jaxllm.core_types import (
    CacheSpec,
    EngineOutput,
    EngineRequest,
    ErrorKind,
    FinishReason,
    Pooled,
    RowResult,
    SchedulerOutput,
    StepResult,
)
from jaxllm.engine.core import EngineCore
from jaxllm.engine.scheduler import Scheduler
from jaxllm.pooling_params import PoolingParams
from jaxllm.sampling_params import SamplingParams

BUDGET = 20


class Pooler:
    """Answers with the length of each prompt; `fail(lengths)` says whether a step of these fails as a whole."""

    cache_spec = CacheSpec(16, ())

    def __init__(self, fail: Callable[[list[int]], bool] = lambda lengths: False):
        self.steps: list[list[int]] = []
        self._fail = fail

    def execute(self, step: SchedulerOutput) -> Answers:
        assert all(row.start == 0 and row.samples for row in step.rows)
        assert {row.slot for row in step.new_rows} == {row.slot for row in step.rows}
        lengths = [row.num_tokens for row in step.rows]
        self.steps.append(lengths)
        if self._fail(lengths):
            raise RuntimeError("no")
        return Answers(lengths)

    def shutdown(self) -> None: ...


class Answers:
    def __init__(self, lengths: list[int]):
        self._lengths = lengths

    def result(self) -> StepResult:
        return StepResult([RowResult(pooled=Pooled.of(np.array([length]))) for length in self._lengths], BUDGET)


def core_with(pooler: Pooler, *, overlapped: bool = False, max_num_seqs: int = 8) -> EngineCore:
    limits = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": BUDGET, "max_model_len": BUDGET}
    scheduler = Scheduler(pooler.cache_spec, **limits, enable_prefix_caching=False, pooling=True)
    return EngineCore(scheduler, pooler, async_scheduling=overlapped)


def add(core: EngineCore, length: int, name: str = "", **fields) -> None:
    params = {"sampling_params": SamplingParams(max_tokens=1), "pooling_params": PoolingParams(task="embed")}
    core.add_request(
        EngineRequest(request_id=name or str(length), prompt_token_ids=[1] * length, arrival_time=time.time(), **params | fields)
    )


def run(core: EngineCore) -> dict[str, EngineOutput]:
    outputs: dict[str, EngineOutput] = {}
    while core.has_work:
        for output in core.step().outputs:
            assert output.request_id not in outputs
            outputs[output.request_id] = output
    return outputs


@pytest.mark.parametrize("overlapped", [False, True])
def test_prompts_are_never_cut_and_short_ones_fill_what_long_ones_leave(overlapped: bool) -> None:
    pooler = Pooler()
    core = core_with(pooler, overlapped=overlapped)
    for number, length in enumerate((12, 15, 3, 20, 5)):
        add(core, length, str(number))

    outputs = run(core)

    assert pooler.steps == [[12, 3, 5], [15], [20]]
    assert [outputs[str(i)].pooled.array.tolist() for i in range(5)] == [[12], [15], [3], [20], [5]]
    assert {output.finish_reason for output in outputs.values()} == {FinishReason.STOP}
    assert core.scheduler.num_running == 0


def test_what_no_step_could_take_is_refused() -> None:
    core = core_with(Pooler())
    add(core, 21)
    add(core, 3, "generate", pooling_params=None)
    outputs = run(core)
    assert "room for 20" in outputs["21"].error
    assert "pooling_params" in outputs["generate"].error
    assert {output.error_kind for output in outputs.values()} == {ErrorKind.INVALID}


def test_a_deadline_or_an_abort_ends_a_waiting_request() -> None:
    pooler = Pooler()
    core = core_with(pooler, max_num_seqs=1)
    for name, fields in (("first", {}), ("late", {"deadline": time.time() - 1}), ("left", {})):
        add(core, 5, name, **fields)
    core.abort_requests(["left"])

    outputs = run(core)

    assert outputs["first"].pooled is not None
    assert (outputs["late"].error_kind, outputs["late"].pooled) == (ErrorKind.DEADLINE, None)
    assert outputs["left"].finish_reason is FinishReason.ABORT
    assert pooler.steps == [[5]]


@pytest.mark.parametrize("overlapped", [False, True])
def test_a_step_that_fails_is_the_end_of_the_one_at_fault_only(overlapped: bool) -> None:
    core = core_with(Pooler(fail=lambda lengths: 7 in lengths), overlapped=overlapped)
    for length in (4, 7, 5):
        add(core, length)

    outputs = run(core)

    assert outputs["7"].error_kind is ErrorKind.FAILED
    assert [outputs[name].pooled.array.tolist() for name in ("4", "5")] == [[4], [5]]
