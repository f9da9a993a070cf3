"""The step loop: both ways give the same, and failures stay with those who cause them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from jaxllm.core_types import ErrorKind, SchedulerOutput
from jaxllm.engine.core import MAX_FAILED_STEPS, EngineCore
from jaxllm.errors import EngineDeadError
from tests.engine.harness import check_empty, make_core, make_request, run
from tests.engine.mock_runner import MockRunner, alone, cache_spec

both_loops = pytest.mark.parametrize("overlapped", [False, True])
both_places = pytest.mark.parametrize("place", ["fail_execute", "fail_compute"])

PROMPTS = {f"r{i}": [i] * (3 + 5 * i) for i in range(6)}


def _rows_of(core: EngineCore, step: SchedulerOutput) -> set[str]:
    requests = core.scheduler._steps.get(step.step_id, [])
    return {request.request_id for request in requests if request is not None}


BROKEN = RuntimeError("this step is broken")


def _failing_core(
    place: str,
    broken: Callable[[set[str], SchedulerOutput], bool],
    error: Exception = BROKEN,
    **options: Any,
) -> EngineCore:
    """An engine whose steps raise `error` where `broken(request ids of the step, step)`."""
    ids: dict[int, set[str]] = {}

    def fail(step: SchedulerOutput) -> None:
        if place == "fail_execute":
            ids[step.step_id] = _rows_of(core, step)
        if broken(ids.get(step.step_id) or _rows_of(core, step), step):
            raise error

    core = make_core(cache_spec(4, 100), runner={place: fail}, **options)
    return core


def test_the_overlapped_loop_enqueues_a_step_before_reading_the_one_before() -> None:
    events: list[str] = []
    core = make_core(overlapped=True)
    runner = core.executor
    assert isinstance(runner, MockRunner)
    execute, compute = runner.execute, runner.compute
    runner.execute = lambda step: (events.append(f"execute {step.step_id}"), execute(step))[1]  # type: ignore[method-assign]
    runner.compute = lambda step, masks: (events.append(f"compute {step.step_id}"), compute(step, masks))[1]  # type: ignore[method-assign]
    run(core, [make_request("x", [1], max_tokens=3)])
    assert events == ["execute 1", "execute 2", "compute 1", "execute 3", "compute 2", "compute 3"]


def test_the_overlapped_loop_does_not_wait_for_work_that_depends_on_the_step_in_flight() -> None:
    core = make_core(overlapped=True)
    collected = run(core, [make_request("x", [1], max_tokens=9, bad_words_token_ids=[[1, 2]]), make_request("y", [2], max_tokens=20)])
    assert len(collected.tokens["x"]) == 9
    assert collected.tokens["y"] == alone([2], 20)


@both_loops
def test_one_request_at_fault_ends_and_the_others_do_not_notice(overlapped: bool) -> None:
    def row_error(request_id: str, tokens: list[int]) -> str | None:
        return "the logits are not finite" if request_id == "r2" and len(tokens) > 15 else None

    core = make_core(cache_spec(4, 100), overlapped=overlapped, runner={"row_error": row_error})
    collected = run(core, [make_request(name, prompt) for name, prompt in PROMPTS.items()])
    assert (collected.last["r2"].error, collected.reason("r2")) == ("the logits are not finite", "error")
    for name, prompt in PROMPTS.items():
        assert collected.tokens[name] == alone(prompt, 3 if name == "r2" else 8)
    check_empty(core.scheduler)


@both_loops
@both_places
def test_a_step_that_fails_because_of_one_request_costs_only_that_one(overlapped: bool, place: str) -> None:
    core = _failing_core(place, lambda ids, step: "r3" in ids, overlapped=overlapped)
    collected = run(core, [make_request(name, prompt) for name, prompt in PROMPTS.items()])
    for name, prompt in PROMPTS.items():
        if name == "r3":
            assert (collected.last[name].error_kind, collected.tokens[name]) == (ErrorKind.FAILED, [])
            assert collected.last[name].error == "RuntimeError: this step is broken"
        else:
            assert (collected.tokens[name], collected.reason(name)) == (alone(prompt, 8), "length")
    check_empty(core.scheduler)


@both_loops
@both_places
def test_a_request_that_fails_in_a_later_chunk_does_not_drag_the_others_along_for_ever(overlapped: bool, place: str) -> None:
    def reaches_17(ids: set[str], step: SchedulerOutput) -> bool:
        return any(row.start <= 16 < row.start + row.num_tokens for row in step.rows)

    core = _failing_core(place, reaches_17, overlapped=overlapped, max_num_batched_tokens=16)
    collected = run(core, [make_request(name, prompt) for name, prompt in PROMPTS.items() if len(prompt) + 8 <= 16 or len(prompt) > 16])
    ends = {name: (collected.reason(name), collected.tokens[name]) for name in collected.last}
    assert ends == {
        "r0": ("length", alone(PROMPTS["r0"], 8)),
        "r1": ("length", alone(PROMPTS["r1"], 8)),
        "r3": ("error", []),
        "r4": ("error", []),
        "r5": ("error", []),
    }


@both_loops
@both_places
def test_a_step_that_fails_once_costs_nobody_anything(overlapped: bool, place: str) -> None:
    core = _failing_core(place, lambda ids, step: step.step_id in (2, 5) and len(ids) > 1, overlapped=overlapped)
    collected = run(core, [make_request(name, prompt) for name, prompt in PROMPTS.items()])
    assert collected.tokens == {name: alone(prompt, 8) for name, prompt in PROMPTS.items()}
    check_empty(core.scheduler)


@both_loops
@both_places
@pytest.mark.parametrize("seed", range(12))
def test_random_failures_under_random_traffic_leave_nothing_behind(overlapped: bool, place: str, seed: int) -> None:
    rng = random.Random(seed)
    cursed = {f"r{i}" for i in range(30) if rng.random() < 0.1}
    core = _failing_core(
        place,
        lambda ids, step: bool(cursed & ids) or (len(ids) > 1 and rng.random() < 0.02),
        overlapped=overlapped,
        max_num_batched_tokens=16,
    )
    requests = {}
    for i in range(30):
        prompt = [rng.randrange(3) for _ in range(rng.randint(1, 40))]
        requests[f"r{i}"] = make_request(f"r{i}", prompt, max_tokens=rng.randint(1, 20))
    collected = run(core, requests.values())
    for name, request in requests.items():
        if name in cursed:
            assert collected.reason(name) == "error"
        else:
            assert collected.tokens[name] == alone(request.prompt_token_ids, request.sampling_params.max_tokens or 0)
    check_empty(core.scheduler)


@both_loops
@both_places
def test_any_number_of_requests_that_the_host_stumbles_over_cost_only_themselves(overlapped: bool, place: str) -> None:
    bad = {str(i) for i in range(3 * MAX_FAILED_STEPS)}
    core = _failing_core(place, lambda ids, step: bool(bad & ids), overlapped=overlapped, error=OverflowError("does not fit"))
    for name in bad:
        core.add_request(make_request(name, [1, 2]))
    collected = run(core, [make_request(name, prompt) for name, prompt in PROMPTS.items()])
    assert {name: collected.last[name].error for name in bad} == dict.fromkeys(bad, "OverflowError: does not fit")
    assert {name: collected.tokens[name] for name in PROMPTS} == {name: alone(prompt, 8) for name, prompt in PROMPTS.items()}
    check_empty(core.scheduler)


@both_loops
@both_places
def test_a_lost_device_ends_the_engine(overlapped: bool, place: str) -> None:
    core = _failing_core(place, lambda ids, step: True, overlapped=overlapped)
    for i in range(MAX_FAILED_STEPS + 5):
        core.add_request(make_request(str(i), [i]))
    with pytest.raises(EngineDeadError, match="8 steps failed one after the other, the last one with RuntimeError: this step is broken"):
        run(core)


@both_loops
def test_a_refused_request_gets_its_error_with_the_next_step(overlapped: bool) -> None:
    core = make_core(overlapped=overlapped, max_num_seqs=1, max_num_queued_reqs=1)
    collected = run(core, [make_request("bad", []), make_request("a", [1]), make_request("b", [1]), make_request("c", [1])])
    assert {name: collected.last[name].error_kind for name in "abc"} == {"a": None, "b": None, "c": ErrorKind.QUEUE_FULL}
    assert collected.last["bad"].error_kind == ErrorKind.INVALID


@both_loops
def test_abort_in_the_middle_of_everything(overlapped: bool) -> None:
    core = make_core(overlapped=overlapped)
    for name in ("running", "other"):
        core.add_request(make_request(name, [1, 2, 3], max_tokens=30))
    for _ in range(3):
        core.step()
    core.abort_requests(["running"])
    outputs = core.step()
    assert [(output.request_id, str(output.finish_reason)) for output in outputs.outputs if output.finish_reason] == [("running", "abort")]
    assert outputs.stats is not None
    assert outputs.stats.num_running == 1
    run(core)
    check_empty(core.scheduler)


def test_shutdown_reaches_the_executor() -> None:
    core = make_core()
    core.shutdown()
    assert core.executor.stopped  # type: ignore[attr-defined]
