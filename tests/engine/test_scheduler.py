"""Which rows a step gets, and what its results do to requests. No device: results are made up here."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from jaxllm.core_types import EngineOutput, ErrorKind, FinishReason, RowResult, SchedulerOutput, StepResult, TokenLogprobs
from jaxllm.engine.scheduler import Scheduler
from jaxllm.errors import ConfigError, InvalidRequestError, QueueFullError
from tests.engine.harness import check_books, check_empty, make_request
from tests.engine.mock_runner import cache_spec

Answer = Callable[[int], RowResult]


def _scheduler(**options: Any) -> Scheduler:
    spec = options.pop("spec", None) or cache_spec(4, 100)
    settings: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64, **options}
    return Scheduler(spec, **settings)


def _schedule(scheduler: Scheduler) -> SchedulerOutput:
    step = scheduler.schedule()
    check_books(scheduler)
    assert step is not None
    return step


def _result(step: SchedulerOutput, token: int = 1) -> StepResult:
    return StepResult([RowResult(token_id=token if row.samples else None) for row in step.rows], num_padded_tokens=32)


def _step(scheduler: Scheduler, token: int = 1) -> tuple[SchedulerOutput, list[EngineOutput]]:
    step = _schedule(scheduler)
    outputs = scheduler.update_from_output(step, _result(step, token))
    check_books(scheduler)
    return step, outputs


def _shape(step: SchedulerOutput) -> list[tuple[int, int, bool]]:
    return [(row.start, row.num_tokens, row.samples) for row in step.rows]


def _names(scheduler: Scheduler) -> list[str]:
    return [request.request_id for request in scheduler._running]


# ---------------------------------------------------------------------- admission


def test_a_prompt_must_leave_room_for_one_token() -> None:
    scheduler = _scheduler()
    scheduler.add(make_request("fits", [1] * 63))
    for length in (64, 65, 5000):
        with pytest.raises(InvalidRequestError, match=f"{length} tokens.*room for 63") as caught:
            scheduler.add(make_request("long", [1] * length))
        assert caught.value.param == "prompt"
    outputs: list[EngineOutput] = []
    while not outputs:
        _, outputs = _step(scheduler)
    assert (outputs[0].new_token_ids, outputs[0].finish_reason) == ([1], FinishReason.LENGTH)


def test_a_prompt_that_the_pages_can_never_hold_is_refused() -> None:
    scheduler = _scheduler(spec=cache_spec(4, 6))
    with pytest.raises(InvalidRequestError, match="21 tokens, but at least one is needed, and there is room for 20 in all"):
        scheduler.add(make_request("x", [1] * 21))
    scheduler.add(make_request("y", [1] * 20, max_tokens=None))
    _step(scheduler)
    _, outputs = _step(scheduler)
    assert outputs[0].finish_reason == FinishReason.LENGTH
    check_empty(scheduler)


def test_an_empty_prompt_and_a_used_id_are_refused() -> None:
    scheduler = _scheduler()
    with pytest.raises(InvalidRequestError, match="has 0 tokens"):
        scheduler.add(make_request("x", []))
    scheduler.add(make_request("x", [1]))
    with pytest.raises(InvalidRequestError, match="'x' is in use"):
        scheduler.add(make_request("x", [1]))


def test_the_queue_bound_counts_those_that_find_no_slot() -> None:
    scheduler = _scheduler(max_num_seqs=2, max_num_queued_reqs=1)
    for name in "abc":
        scheduler.add(make_request(name, [1]))
    with pytest.raises(QueueFullError, match="max_num_queued_reqs=1"):
        scheduler.add(make_request("d", [1]))
    _step(scheduler)
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    with pytest.raises(QueueFullError):
        scheduler.add(make_request("d", [1]))
    scheduler.abort(["c"])
    scheduler.add(make_request("d", [1]))


def test_the_queue_bound_counts_tokens_of_those_that_find_no_slot() -> None:
    scheduler = _scheduler(max_num_seqs=1, max_num_queued_tokens=10)
    scheduler.add(make_request("long", [1] * 20))
    _step(scheduler)
    scheduler.add(make_request("a", [1] * 6))
    with pytest.raises(QueueFullError, match="11 tokens would wait and max_num_queued_tokens=10"):
        scheduler.add(make_request("b", [1] * 5))
    scheduler.add(make_request("b", [1] * 4))
    scheduler.abort(["a"])
    scheduler.add(make_request("c", [1] * 6))


def test_a_pool_without_room_for_a_prompt_is_a_config_error() -> None:
    with pytest.raises(ConfigError):
        _scheduler(max_model_len=1)


# ---------------------------------------------------------------------- rows of a step


def test_a_long_prompt_is_cut_into_chunks_and_samples_once() -> None:
    scheduler = _scheduler()
    scheduler.add(make_request("x", [5] * 40))
    shapes = [_shape(_step(scheduler)[0]) for _ in range(4)]
    assert shapes == [[(0, 16, False)], [(16, 16, False)], [(32, 8, True)], [(40, 1, True)]]


def test_running_requests_get_their_token_before_a_long_prompt_gets_the_rest() -> None:
    scheduler = _scheduler()
    scheduler.add(make_request("long", list(range(60)), max_tokens=2))
    scheduler.add(make_request("short", [7], max_tokens=20))
    assert _shape(_step(scheduler)[0]) == [(0, 16, False)]
    assert _shape(_step(scheduler)[0]) == [(16, 16, False)]
    scheduler.max_num_batched_tokens = 17
    assert _shape(_step(scheduler)[0]) == [(32, 17, False)]
    scheduler.max_num_batched_tokens = 20
    # The last chunk leaves room for the next request; single tokens come first.
    assert _shape(_step(scheduler)[0]) == [(0, 1, True), (49, 11, True)]
    assert _shape(_step(scheduler)[0]) == [(60, 1, True), (1, 1, True)]


def test_decodes_are_not_starved_by_an_older_prompt() -> None:
    scheduler = _scheduler(policy="priority")
    scheduler.add(make_request("decoding", [7], max_tokens=20, priority=1))
    _step(scheduler)
    scheduler.add(make_request("prompt", list(range(60)), priority=0))
    for start in (0, 15, 30):
        step, _ = _step(scheduler)
        assert step.rows[0].num_tokens == 1
        assert (step.rows[1].start, step.rows[1].num_tokens) == (start, 15)


def test_a_new_row_brings_all_that_the_runner_needs_and_later_rows_only_new_pages() -> None:
    scheduler = _scheduler(seed=3)
    scheduler.add(make_request("x", [5, 6, 7], max_tokens=10, seed=11))
    scheduler.add(make_request("y", [8], max_tokens=10))
    step, _ = _step(scheduler)
    x, y = sorted(step.new_rows, key=lambda row: row.request_id)
    assert (x.prompt_len, x.token_ids, x.seed, list(map(len, x.page_ids))) == (3, [5, 6, 7], 11, [1])
    assert 0 <= y.seed < 2**63
    assert all(row.new_page_ids == [[]] for row in step.rows)
    new_pages = [[len(row.new_page_ids[0]) for row in sorted(_step(scheduler)[0].rows, key=lambda row: -row.start)] for _ in range(6)]
    assert new_pages == [[0, 0], [1, 0], [0, 0], [0, 1], [0, 0], [1, 0]]


def test_a_seedless_request_draws_by_engine_seed_and_id() -> None:
    def seed(engine_seed: int, name: str) -> int:
        scheduler = _scheduler(seed=engine_seed)
        scheduler.add(make_request(name, [1]))
        return _schedule(scheduler).new_rows[0].seed

    assert seed(0, "a") == seed(0, "a")
    assert len({seed(0, "a"), seed(0, "b"), seed(1, "a")}) == 3


def test_equal_prompts_are_computed_once() -> None:
    scheduler = _scheduler()
    for i in range(3):
        scheduler.add(make_request(str(i), list(range(14))))
    assert _shape(_step(scheduler)[0]) == [(0, 14, True)]
    assert _shape(_step(scheduler)[0]) == [(14, 1, True), (12, 2, True), (12, 2, True)]


def test_a_request_can_be_ahead_of_its_results_by_one_token() -> None:
    scheduler = _scheduler()
    scheduler.add(make_request("x", [1, 2], max_tokens=3))
    first, second = _schedule(scheduler), _schedule(scheduler)
    assert (_shape(first), _shape(second)) == ([(0, 2, True)], [(2, 1, True)])
    scheduler.update_from_output(first, _result(first))
    third = _schedule(scheduler)
    assert _shape(third) == [(3, 1, True)]
    scheduler.update_from_output(second, _result(second))
    # The token in flight is the last one: there is nothing to be ahead for.
    assert scheduler.schedule() is None
    (output,) = scheduler.update_from_output(third, _result(third))
    assert output.finish_reason == FinishReason.LENGTH
    check_empty(scheduler)


# ---------------------------------------------------------------------- ends


def _run_until_finished(scheduler: Scheduler, tokens: list[int]) -> EngineOutput:
    for token in tokens:
        _, outputs = _step(scheduler, token)
        for output in outputs:
            if output.finish_reason is not None:
                check_empty(scheduler)
                return output
    raise AssertionError("not finished")


@pytest.mark.parametrize(
    ("fields", "tokens", "reason", "stop_reason"),
    [
        ({"eos_token_ids": [9, 8]}, [1, 8], FinishReason.STOP, None),
        ({"eos_token_ids": [9], "ignore_eos": True, "max_tokens": 3}, [9, 9, 9], FinishReason.LENGTH, None),
        ({"stop_token_ids": [9]}, [1, 9], FinishReason.STOP, 9),
        ({"stop_token_ids": [9], "ignore_eos": True, "eos_token_ids": [9]}, [9], FinishReason.STOP, 9),
        ({"eos_token_ids": [9], "stop_token_ids": [8], "min_tokens": 3}, [9, 8, 9], FinishReason.STOP, None),
        ({"max_tokens": 2}, [1, 1], FinishReason.LENGTH, None),
        ({"max_tokens": 1, "eos_token_ids": [9]}, [9], FinishReason.STOP, None),
        ({"max_tokens": None, "min_tokens": 62, "eos_token_ids": [9]}, [9] * 62, FinishReason.LENGTH, None),
    ],
)
def test_how_a_request_ends(fields: dict, tokens: list[int], reason: FinishReason, stop_reason: int | None) -> None:
    scheduler = _scheduler()
    scheduler.add(make_request("x", [1, 2, 3], **fields))
    output = _run_until_finished(scheduler, tokens)
    assert (output.finish_reason, output.stop_reason, output.new_token_ids) == (reason, stop_reason, tokens[-1:])


def test_a_token_behind_the_end_is_thrown_away() -> None:
    scheduler = _scheduler()
    scheduler.add(make_request("x", [1, 2], stop_token_ids=[9]))
    first, second = _schedule(scheduler), _schedule(scheduler)
    (output,) = scheduler.update_from_output(first, _result(first, 9))
    assert output.finish_reason == FinishReason.STOP
    # The slot and the pages may be used again although the step is still in flight.
    scheduler.add(make_request("y", [3], max_tokens=1))
    third = _schedule(scheduler)
    assert third.rows[0].slot == second.rows[0].slot
    assert scheduler.update_from_output(second, _result(second)) == []
    (output,) = scheduler.update_from_output(third, _result(third))
    assert output.request_id == "y"
    check_empty(scheduler)


def test_abort_frees_pages_at_once_with_steps_in_flight() -> None:
    scheduler = _scheduler()
    scheduler.add(make_request("x", [1] * 20))
    scheduler.add(make_request("waiting", [1] * 20))
    first, second = _schedule(scheduler), _schedule(scheduler)
    scheduler.abort(["x", "waiting", "unknown"])
    assert scheduler.kv.usage == 0
    assert scheduler.num_running == scheduler.num_waiting == 0
    assert [(output.request_id, output.finish_reason) for output in scheduler.take_outputs()] == [
        ("x", FinishReason.ABORT),
        ("waiting", FinishReason.ABORT),
    ]
    # An id may be used again while its namesake's step is in flight.
    scheduler.add(make_request("x", [2], max_tokens=1))
    assert scheduler.update_from_output(first, _result(first)) == scheduler.update_from_output(second, _result(second)) == []
    _, (output,) = _step(scheduler)
    assert output.finish_reason == FinishReason.LENGTH
    check_empty(scheduler)


def test_deadlines_end_running_and_waiting_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    scheduler = _scheduler(max_num_seqs=1)
    scheduler.add(make_request("running", [1], deadline=now + 100, arrival_time=now))
    scheduler.add(make_request("waiting", [1], deadline=now + 100, arrival_time=now))
    scheduler.add(make_request("later", [1], deadline=now + 1000, arrival_time=now, max_tokens=1))
    _step(scheduler)
    monkeypatch.setattr(time, "time", lambda: now + 101)
    _step(scheduler)
    ended = scheduler.take_outputs()
    assert [(output.request_id, output.finish_reason, output.error_kind) for output in ended] == [
        ("running", FinishReason.ABORT, ErrorKind.DEADLINE),
        ("waiting", FinishReason.ABORT, ErrorKind.DEADLINE),
    ]
    assert "deadline" in str(ended[0].error)
    check_empty(scheduler)


def test_a_deadline_of_an_ended_request_does_not_touch_its_namesake(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    scheduler = _scheduler()
    scheduler.add(make_request("x", [1], deadline=now + 100, max_tokens=1))
    _step(scheduler)
    scheduler.add(make_request("x", [1], max_tokens=5))
    monkeypatch.setattr(time, "time", lambda: now + 101)
    _step(scheduler)
    assert scheduler.take_outputs() == []


def test_deadlines_of_ended_requests_do_not_pile_up() -> None:
    scheduler = _scheduler()
    for i in range(300):
        scheduler.add(make_request(str(i), [1], max_tokens=1, deadline=time.time() + 1000))
        _step(scheduler)
    assert len(scheduler._deadlines) <= 70


# ---------------------------------------------------------------------- preemption


def test_fcfs_preempts_the_newest_and_it_comes_back_first() -> None:
    scheduler = _scheduler(spec=cache_spec(4, 7), enable_prefix_caching=False, max_num_batched_tokens=64)
    for name in "abc":
        scheduler.add(make_request(name, [ord(name)] * 4, max_tokens=30))
    for _ in range(5):
        _step(scheduler)
    assert _names(scheduler) == ["a", "b", "c"]
    scheduler.add(make_request("d", [4]))
    # Three requests of 8 positions fill six pages; the ninth position of the oldest needs one more.
    _step(scheduler)
    assert _names(scheduler) == ["a", "b"]
    scheduler.abort(["a"])
    _step(scheduler)
    assert _names(scheduler) == ["b", "c"]


def test_priority_preempts_the_worst_and_breaks_ties_by_arrival() -> None:
    scheduler = _scheduler(spec=cache_spec(4, 7), policy="priority", enable_prefix_caching=False, max_num_batched_tokens=64)
    scheduler.add(make_request("best", [1] * 4, priority=-1, arrival_time=9.0))
    scheduler.add(make_request("early", [2] * 4, priority=3, arrival_time=1.0))
    scheduler.add(make_request("late", [3] * 4, priority=3, arrival_time=2.0))
    _step(scheduler)
    assert _names(scheduler) == ["best", "early", "late"]
    for _ in range(4):
        _step(scheduler)
    # Three requests of 8 positions fill six pages; the ninth position of the best needs one more.
    step, _ = _step(scheduler)
    assert _names(scheduler) == ["best", "early"]
    assert len(step.rows) == 2
    assert scheduler.stats().num_preemptions == 1


def test_a_waiting_request_of_better_priority_goes_first() -> None:
    scheduler = _scheduler(max_num_seqs=1, policy="priority")
    for name, priority, arrival in (("c", 5, 1.0), ("b", 0, 3.0), ("a", 0, 2.0)):
        scheduler.add(make_request(name, [1], max_tokens=1, priority=priority, arrival_time=arrival))
    order = [_step(scheduler)[1][0].request_id for _ in range(3)]
    assert order == ["a", "b", "c"]


def test_fcfs_ignores_priority() -> None:
    scheduler = _scheduler(max_num_seqs=1)
    for name, priority in (("first", 5), ("second", 0)):
        scheduler.add(make_request(name, [1], max_tokens=1, priority=priority))
    assert [_step(scheduler)[1][0].request_id for _ in range(2)] == ["first", "second"]


def test_a_preempted_request_keeps_its_token_in_flight_and_waits_for_it() -> None:
    scheduler = _scheduler(spec=cache_spec(4, 5), enable_prefix_caching=False)
    scheduler.add(make_request("old", [1] * 4, max_tokens=12))
    scheduler.add(make_request("new", [2] * 4, max_tokens=12))
    for _ in range(4):
        _step(scheduler)
    first = _schedule(scheduler)
    assert len(first.rows) == 2
    second = _schedule(scheduler)
    assert _names(scheduler) == ["old"]
    scheduler.abort(["old"])
    # Pages are free now, but the token that "new" sampled is not known yet.
    assert scheduler.schedule() is None
    outputs = scheduler.update_from_output(first, _result(first, 7))
    assert [(output.request_id, output.new_token_ids) for output in outputs] == [("new", [7])]
    assert scheduler.update_from_output(second, _result(second)) == []
    step = _schedule(scheduler)
    assert step.new_rows[0].token_ids == [2, 2, 2, 2, 1, 1, 1, 1, 7]
    assert step.new_rows[0].prompt_len == 4


def test_no_admission_in_a_step_that_preempted() -> None:
    scheduler = _scheduler(spec=cache_spec(4, 5), enable_prefix_caching=False)
    for name in ("old", "new"):
        scheduler.add(make_request(name, [1] * 4, max_tokens=12))
    for _ in range(4):
        _step(scheduler)
    scheduler.add(make_request("waiting", [3], max_tokens=1))
    assert len(_schedule(scheduler).rows) == 2
    # "new" is preempted and cannot come back before its token in flight does; "waiting" must not take its pages.
    _schedule(scheduler)
    assert _names(scheduler) == ["old"]


def test_an_admission_leaves_pages_for_those_that_run() -> None:
    scheduler = _scheduler(spec=cache_spec(4, 201), max_model_len=900, max_num_batched_tokens=1000)
    scheduler.add(make_request("alone", [1] * 800, max_tokens=1))
    _, (output,) = _step(scheduler)
    assert output.request_id == "alone"
    scheduler.add(make_request("running", [2] * 4, max_tokens=20))
    _step(scheduler)
    scheduler.add(make_request("tight", [3] * 4 * 197, max_tokens=1))
    _step(scheduler)
    assert _names(scheduler) == ["running"]


# ---------------------------------------------------------------------- what comes with the tokens


def test_prompt_logprobs_are_gathered_over_chunks_and_delivered_once() -> None:
    scheduler = _scheduler(max_num_batched_tokens=4)
    scheduler.add(make_request("x", list(range(10)), prompt_logprobs=1, max_tokens=2))
    delivered = []
    while scheduler.has_work:
        step = _schedule(scheduler)
        (row,) = step.rows
        positions = range(row.start + 1, min(row.start + row.num_tokens, 9) + 1)
        entries = [TokenLogprobs([position], [-1.0 * position], 1) for position in positions]
        outputs = scheduler.update_from_output(step, StepResult([RowResult(5 if row.samples else None, None, entries)], 4))
        delivered += [[entry.token_ids[0] for entry in output.prompt_logprobs] for output in outputs if output.prompt_logprobs]
    assert delivered == [list(range(1, 10))]


def test_missing_prompt_logprobs_are_an_error_and_not_silence() -> None:
    scheduler = _scheduler()
    scheduler.add(make_request("x", list(range(10)), prompt_logprobs=1))
    _, (output,) = _step(scheduler)
    assert (output.finish_reason, output.error) == (FinishReason.ERROR, "0 of 9 prompt logprobs came with its steps")
    check_empty(scheduler)


def test_the_first_output_tells_what_is_told_once() -> None:
    scheduler = _scheduler()
    for _ in range(2):
        scheduler.add(make_request("x", list(range(9)), max_tokens=2))
        _, (first,) = _step(scheduler)
        _, (second,) = _step(scheduler)
        assert first.first_scheduled_time is not None
        assert (second.num_cached_tokens, second.first_scheduled_time) == (None, None)
    assert first.num_cached_tokens == 8
    stats = scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (18, 8)


def test_bans_follow_the_outputs_and_wait_for_the_token_in_flight() -> None:
    scheduler = _scheduler()
    scheduler.add(make_request("x", [4, 5], bad_words_token_ids=[[7], [5, 1], [2, 3], [6, 2, 9], [2, 8]], max_tokens=9))
    first = _schedule(scheduler)
    # The prompt does not count, and single tokens are the runner's.
    assert first.banned_token_ids == {}
    assert scheduler.schedule() is None
    slot = first.rows[0].slot
    bans = []
    scheduler.update_from_output(first, _result(first, 6))
    for token in (2, 2, 4, 4):
        step = _schedule(scheduler)
        bans.append(step.banned_token_ids)
        scheduler.update_from_output(step, _result(step, token))
    assert bans == [{}, {slot: [3, 8, 9]}, {slot: [3, 8]}, {slot: []}]


def test_bans_are_sent_again_to_a_slot_that_is_taken_again() -> None:
    scheduler = _scheduler()
    scheduler.add(make_request("x", [4], bad_words_token_ids=[[2, 3]], max_tokens=9))
    _step(scheduler, 2)
    assert list(_schedule_and_preempt(scheduler).banned_token_ids.values()) == [[3]]
    assert list(_schedule(scheduler).banned_token_ids.values()) == [[3]]


def _schedule_and_preempt(scheduler: Scheduler) -> SchedulerOutput:
    step = _schedule(scheduler)
    scheduler._preempt(scheduler._running[0])
    scheduler.update_from_output(step, _result(step, 2))
    return step


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize("kind", [ErrorKind.FAILED, ErrorKind.INVALID])
def test_an_error_ends_only_its_request_and_keeps_its_pages_from_others(kind: ErrorKind) -> None:
    scheduler = _scheduler()
    scheduler.add(make_request("bad", list(range(8)), max_tokens=5))
    scheduler.add(make_request("good", [9], max_tokens=5))
    step = _schedule(scheduler)
    (slot,) = (row.slot for row in step.new_rows if row.request_id == "bad")
    failed = RowResult(error="the logits are not finite", error_kind=kind)
    rows = [failed if row.slot == slot else RowResult(token_id=1) for row in step.rows]
    outputs = {output.request_id: output for output in scheduler.update_from_output(step, StepResult(rows, 16))}
    assert (outputs["bad"].finish_reason, outputs["bad"].error) == (FinishReason.ERROR, "the logits are not finite")
    assert outputs["bad"].error_kind == kind
    assert outputs["good"].new_token_ids == [1]
    scheduler.add(make_request("again", list(range(8)), max_tokens=5))
    assert (0, 8, True) in _shape(_schedule(scheduler))


def test_the_error_of_an_aborted_request_still_empties_the_cache_of_its_pages() -> None:
    scheduler = _scheduler()
    scheduler.add(make_request("bad", list(range(9)), max_tokens=5))
    step = _schedule(scheduler)
    scheduler.abort(["bad"])
    assert scheduler.update_from_output(step, StepResult([RowResult(error="not finite")], 16)) == []
    scheduler.add(make_request("again", list(range(9)), max_tokens=5))
    assert _shape(_schedule(scheduler)) == [(0, 9, True)]


def test_a_result_that_cannot_be_read_ends_its_request() -> None:
    scheduler = _scheduler()
    scheduler.add(make_request("x", [1], prompt_logprobs=1))
    step = _schedule(scheduler)
    (output,) = scheduler.update_from_output(step, StepResult([RowResult(token_id=1, prompt_logprobs=5)], 16))  # type: ignore[arg-type]
    assert output.finish_reason == FinishReason.ERROR
    check_empty(scheduler)


def test_stats_count_since_the_last_snapshot() -> None:
    scheduler = _scheduler()
    scheduler.add(make_request("x", [1] * 10, max_tokens=3))
    _step(scheduler)
    stats = scheduler.stats()
    assert (stats.num_steps, stats.num_scheduled_tokens, stats.num_padded_tokens, stats.num_running) == (1, 10, 32, 1)
    assert stats.kv_cache_usage == pytest.approx(3 / 99)
    _step(scheduler)
    assert scheduler.stats().num_scheduled_tokens == 1


# ---------------------------------------------------------------------- inputs of an encoder


def test_encoder_inputs_share_a_budget_of_their_own_and_are_never_cut() -> None:
    scheduler = _scheduler(spec=cache_spec(4, 100, encoder=(16, 100)))
    for name, length in (("a", 10), ("b", 6), ("c", 1), ("d", 16)):
        scheduler.add(make_request(name, [1] * 8, encoder_token_ids=[5] * length))
    steps = [_step(scheduler)[0] for _ in range(3)]
    assert [[len(row.encoder_token_ids) for row in step.new_rows] for step in steps] == [[10, 6], [1], [16]]


def test_an_encoder_input_that_can_never_be_computed_or_kept_is_refused() -> None:
    for pages, fits in ((100, 16), (4, 12)):
        scheduler = _scheduler(spec=cache_spec(4, 100, encoder=(64, pages)))
        scheduler.add(make_request("fits", [1], encoder_token_ids=[5] * fits))
        with pytest.raises(InvalidRequestError, match=f"{fits + 1} tokens.*{fits} fit"):
            scheduler.add(make_request("long", [1], encoder_token_ids=[5] * (fits + 1)))
        with pytest.raises(InvalidRequestError, match="encoder_token_ids are needed"):
            scheduler.add(make_request("none", [1]))
    with pytest.raises(InvalidRequestError, match="by no others"):
        _scheduler().add(make_request("some", [1], encoder_token_ids=[5]))
