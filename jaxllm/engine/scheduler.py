"""Which tokens of which requests the next step computes, and what its results mean for them."""

from __future__ import annotations

import heapq
import logging
import time
from bisect import insort
from collections.abc import Iterable
from operator import attrgetter

import numpy as np

from jaxllm.config import SchedulingPolicy
from jaxllm.core_types import (
    CacheSpec,
    EngineOutput,
    EngineRequest,
    ErrorKind,
    FinishReason,
    NewRow,
    RowResult,
    ScheduledRow,
    SchedulerOutput,
    SchedulerStats,
    StepResult,
)
from jaxllm.engine.kv_cache_manager import KVCacheManager
from jaxllm.engine.request import Request, Status
from jaxllm.engine.structured_output import GrammarMasks
from jaxllm.errors import ConfigError, InvalidRequestError, QueueFullError

logger = logging.getLogger(__name__)

# Share of each pool that an admission leaves free while others run: their next pages, so that admission does not cause preemption.
_ADMISSION_RESERVE = 0.01
_by_key = attrgetter("key")


class Scheduler:
    """Shares a token budget among requests, step by step.

    There are no phases: every request has computed tokens chasing known ones. Rows that need one token come first, then the rest of
    running prompts, then waiting requests. A running request that finds no page preempts the one with the largest key (newest, or worst
    priority), which is computed again later. `schedule` may be called before the results of earlier steps are in: a token in flight
    is known by its position alone.

    Raises (on construction):
        ConfigError: a pool without a usable page.
    """

    def __init__(
        self,
        spec: CacheSpec,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        policy: SchedulingPolicy = "fcfs",
        enable_prefix_caching: bool = True,
        max_num_queued_reqs: int | None = None,
        max_num_queued_tokens: int | None = None,
        seed: int = 0,
        grammars: GrammarMasks | None = None,
        pooling: bool = False,
    ):
        self.kv = KVCacheManager(spec, enable_prefix_caching=enable_prefix_caching)
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.max_num_queued_reqs = max_num_queued_reqs
        self.max_num_queued_tokens = max_num_queued_tokens
        self.seed = seed
        self.grammars = grammars
        # Requests are pooled: each is computed in one step, and gets no token.
        self.pooling = pooling
        self._by_priority = policy == "priority"
        # The last sampled token is never stored, so a sequence may be one longer than its pages.
        positions = self.kv.max_positions()
        self.max_len = max_model_len if positions is None else min(max_model_len, positions + 1)
        if self.max_len < 2:
            raise ConfigError(f"max_model_len={max_model_len} leaves no room for a prompt and an output; at least 2 is needed")
        if self.max_len < max_model_len:
            logger.warning(
                "the KV cache holds %d positions, fewer than max_model_len=%d: requests end with reason length at %d tokens",
                self.max_len - 1,
                max_model_len,
                self.max_len,
            )

        self._requests: dict[str, Request] = {}
        self._waiting: list[Request] = []  # best key first
        self._running: list[Request] = []
        self._suspects: list[Request] = []
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        # Steps whose results are not in yet: step id -> the requests of its rows (None where the result must be thrown away).
        self._steps: dict[int, list[Request | None]] = {}
        self._deadlines: list[tuple[float, str]] = []
        # Outputs that came about outside a step's results.
        self._outputs: list[EngineOutput] = []
        self._sequence = 0
        self._step_id = 0
        self._counts = SchedulerStats()

    # ------------------------------------------------------------------ requests come and go

    @property
    def has_work(self) -> bool:
        """Whether a step could bring anything: unfinished requests, results not read yet, or outputs not taken yet."""
        return bool(self._requests or self._steps or self._outputs)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + sum(1 for request in self._suspects if request.status is Status.SUSPECT)

    def add(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises:
            InvalidRequestError: an id in use, an empty prompt, or one that can never be served.
            QueueFullError: `max_num_queued_reqs` requests wait already, beyond those that a free slot is there for; or more than
                `max_num_queued_tokens` would.
        """
        if request.request_id in self._requests:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use; choose another", param="request_id")
        if (request.pooling_params is not None) != self.pooling:
            needed = "pooling_params: it answers with vectors" if self.pooling else "sampling_params: it generates"
            raise InvalidRequestError(f"requests to this model need {needed}")
        length, longest = len(request.prompt_token_ids), self.max_model_len if self.pooling else self.max_len - 1
        if not 1 <= length <= longest:
            raise InvalidRequestError(
                f"the prompt has {length} tokens, but at least one is needed, and there is room for {longest} in all; where the KV cache "
                "is the limit, more memory helps (gpu_memory_utilization, kv_cache_memory_bytes)",
                param="prompt",
            )
        longest, num_encoder_tokens = min(self.max_num_batched_tokens, self.kv.max_encoder_len), len(request.encoder_token_ids)
        if (longest > 0) != (num_encoder_tokens > 0):
            raise InvalidRequestError("encoder_token_ids are needed by models with an encoder, and by no others", param="prompt")
        if num_encoder_tokens > longest:
            raise InvalidRequestError(
                f"the encoder's input has {num_encoder_tokens} tokens, but is computed in one step and kept whole: {longest} fit; "
                "raise max_num_batched_tokens or the cache's memory (gpu_memory_utilization, kv_cache_memory_bytes)",
                param="prompt",
            )
        queued = len(self._waiting) - len(self._free_slots)
        if self.max_num_queued_reqs is not None and queued >= self.max_num_queued_reqs:
            raise QueueFullError(
                f"{len(self._waiting)} requests are waiting and max_num_queued_reqs={self.max_num_queued_reqs}; try again later"
            )
        if self.max_num_queued_tokens is not None and queued >= 0:
            tokens = length + sum(waiting.num_tokens for waiting in self._waiting)
            if tokens > self.max_num_queued_tokens:
                raise QueueFullError(f"{tokens} tokens would wait and max_num_queued_tokens={self.max_num_queued_tokens}; try again later")
        grammar = thinking = None
        params = request.sampling_params
        if params.output_grammar is not None or params.thinking_token_budget is not None:
            if self.grammars is None:
                name = "thinking_token_budget" if params.output_grammar is None else "structured_outputs"
                raise InvalidRequestError(f"this engine was started without a tokenizer, which {name} needs", param=name)
            grammar = self.grammars.start(params) if params.output_grammar is not None else None
            thinking = self.grammars.budget(params) if params.thinking_token_budget is not None else None
        self._sequence += 1
        entry = Request(
            request,
            sequence=self._sequence,
            by_priority=self._by_priority,
            max_len=self.max_len,
            num_groups=self.kv.num_groups,
            seed=self.seed,
            grammar=grammar,
            thinking=thinking,
        )
        self._requests[entry.request_id] = entry
        insort(self._waiting, entry, key=_by_key)
        if entry.deadline is not None:
            heapq.heappush(self._deadlines, (entry.deadline, entry.request_id))
            if len(self._deadlines) > 2 * len(self._requests) + 64:
                # Most belong to requests that ended in time.
                requests = self._requests.values()
                self._deadlines = [(request.deadline, request.request_id) for request in requests if request.deadline is not None]
                heapq.heapify(self._deadlines)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests now and free their pages, whatever is in flight. Unknown ids are those that have ended: nothing happens."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._outputs.append(self._finish(request, FinishReason.ABORT))

    def take_outputs(self) -> list[EngineOutput]:
        """Outputs that no step result brought (aborts, deadlines, failures) since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def _expire(self) -> None:
        now = time.time()
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, request_id = heapq.heappop(self._deadlines)
            request = self._requests.get(request_id)
            if request is not None and request.deadline == deadline:
                error = f"the deadline of the request passed after {now - request.arrival_time:.1f} s"
                self._outputs.append(self._finish(request, FinishReason.ABORT, error=error, kind=ErrorKind.DEADLINE))

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        *,
        stop_reason: int | None = None,
        error: str | None = None,
        kind: ErrorKind | None = None,
    ) -> EngineOutput:
        if request.status is Status.WAITING:
            self._waiting.remove(request)
        else:
            self._release(request)
        if request in self._suspects:
            self._suspects.remove(request)
        request.status = Status.FINISHED
        del self._requests[request.request_id]
        output = self._output(request)
        output.finish_reason, output.stop_reason, output.error, output.error_kind = reason, stop_reason, error, kind
        return output

    def _release(self, request: Request) -> None:
        """Take slot and pages from a running request."""
        if request.status is Status.RUNNING:
            self._running.remove(request)
            self._free_slots.append(request.slot)
            request.slot = -1
            self.kv.free(request)

    # ------------------------------------------------------------------ a step is decided

    def schedule(self) -> SchedulerOutput | None:
        """Decide the next step; None where nothing can run before results of steps in flight are in, or at all."""
        self._expire()
        plan: dict[Request, int] = {}
        if self._suspects:
            self._plan_suspect(plan, self._suspects[0])
        elif self._plan_running(plan) and self._waiting and self._free_slots:
            self._plan_waiting(plan)
        return self._build(plan) if plan else None

    def masks(self, step: SchedulerOutput) -> dict[int, np.ndarray]:
        """What the rows of an enqueued step that wait may sample, by slot, now that all tokens before theirs are known.

        Requests for which nothing is left end here: done where their grammar may end.
        """
        waiting = {
            request: row.slot
            for request, row in zip(self._steps.get(step.step_id, ()), step.rows, strict=False)
            if row.waits and request is not None and request.status is not Status.FINISHED
        }
        if not waiting:
            return {}
        assert self.grammars is not None
        masks = self._grammar_masks([request for request in waiting if request.grammar is not None])
        for request in waiting:
            if request.thinking is not None and request.status is not Status.FINISHED:
                forced = request.thinking.forced
                if forced is not None or request.grammar is None:
                    masks[request] = self.grammars.mask(request.params, forced)
        return {waiting[request]: mask for request, mask in masks.items()}

    def _grammar_masks(self, waiting: list[Request]) -> dict[Request, np.ndarray]:
        assert self.grammars is not None
        try:
            masks = dict(zip(waiting, self.grammars.masks([request.grammar for request in waiting if request.grammar]), strict=True))
        except Exception as error:
            logger.exception("the masks of %d requests could not be computed", len(waiting))
            for request in waiting:
                reason = f"its output grammar could not be followed: {type(error).__name__}: {error}"
                self._outputs.append(self._finish(request, FinishReason.ERROR, error=reason, kind=ErrorKind.FAILED))
            return {}
        for request in [request for request, mask in masks.items() if not mask.any()]:
            del masks[request]
            grammar = request.grammar
            assert grammar is not None
            if grammar.may_end:
                self._outputs.append(self._finish(request, FinishReason.STOP))
            else:
                self._outputs.append(self._finish(request, FinishReason.ERROR, error=grammar.dead_end, kind=ErrorKind.INVALID))
        return masks

    def await_grammars(self, seconds: float) -> None:
        """Where nothing runs because grammars are being compiled: return when one is ready, or after `seconds`."""
        grammars = [request.grammar for request in self._waiting if request.grammar is not None and not request.grammar.is_ready]
        if grammars and not self._running:
            GrammarMasks.wait(grammars, seconds)

    def _plan_running(self, plan: dict[Request, int]) -> bool:
        """Running rows, single tokens first so that long prompts do not starve them. False where one had to be preempted."""
        budget = self.max_num_batched_tokens
        complete = True
        longer = []
        for request in list(self._running):
            wanted = self._wanted(request)
            if wanted > 1:
                longer.append(request)
            elif wanted == 1 and len(plan) < budget:
                complete &= self._fit(plan, request, 1)
        for request in longer:
            num_new = min(self._wanted(request), budget - sum(plan.values()))
            if num_new > 0:
                complete &= self._fit(plan, request, num_new)
        return complete

    def _wanted(self, request: Request) -> int:
        """Tokens that the request could compute now."""
        if request.status is not Status.RUNNING:
            return 0
        if request.num_in_flight and (request.needs_last_token or request.num_tokens >= request.max_total):
            # What may come next depends on the token in flight; or that token is the last one.
            return 0
        return request.num_tokens - request.num_computed

    def _fit(self, plan: dict[Request, int], request: Request, num_new: int) -> bool:
        """Plan the request's next tokens, preempting others (or itself) for pages. False where somebody was preempted."""
        complete = True
        while (fits := self.kv.grow(request, num_new)) == 0:
            complete = False
            victim = self._running[-1]
            self._preempt(victim)
            plan.pop(victim, None)
            if victim is request:
                return False
        plan[request] = fits
        return complete

    def _plan_waiting(self, plan: dict[Request, int]) -> None:
        budget = self.max_num_batched_tokens - sum(plan.values())
        # Encoder inputs are computed beside the step's tokens, each in one piece.
        encoder_budget = self.max_num_batched_tokens
        passed_over = 0
        for request in tuple(self._waiting):
            if budget <= 0 or passed_over >= len(self._free_slots):
                break
            if request.grammar is not None and not request.grammar.is_ready:
                continue
            if request.grammar is not None and (error := request.grammar.failure) is not None:
                self._outputs.append(self._finish(request, FinishReason.ERROR, error=error, kind=ErrorKind.INVALID))
                continue
            if len(request.encoder_token_ids) > encoder_budget:
                break
            # A preempted request's token may still be in flight; or a running request is computing the very prefix that this one needs.
            if request.num_steps_in_flight or (num_new := self._admit(request, budget)) is None:
                passed_over += 1
                continue
            if num_new == 0:
                break
            self._waiting.remove(request)
            plan[request] = num_new
            budget -= num_new
            encoder_budget -= len(request.encoder_token_ids)

    def _admit(self, request: Request, budget: int) -> int | None:
        """Give a slot and pages. Returns the tokens of its first step, 0 where pages lack, None where others may go before it: its prefix
        is being computed, or it must not be cut and does not fit this step.
        """
        hit = self.kv.find_prefix(request)
        if hit.pending or (self.pooling and len(request.token_ids) > budget):
            return None
        wanted = min(len(request.token_ids) - hit.num_tokens, budget)
        num_new = self.kv.admit(request, hit, wanted, reserve=_ADMISSION_RESERVE if self._running else 0.0)
        if num_new == 0:
            return 0
        request.status = Status.RUNNING
        request.slot = self._free_slots.pop()
        request.is_new_row = True
        request.sent_bans = []
        insort(self._running, request, key=_by_key)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = hit.num_tokens
            request.first_scheduled_time = time.time()
            if self.kv.enable_prefix_caching and request.prompt_logprobs is None:
                self._counts.prefix_cache_queries += len(request.token_ids)
                self._counts.prefix_cache_hits += hit.num_tokens
        return num_new

    def _preempt(self, request: Request) -> None:
        """Take slot and pages away; the request is computed again when its turn comes. A token in flight is kept."""
        self._release(request)
        request.status = Status.WAITING
        request.num_preemptions += 1
        self._counts.num_preemptions += 1
        insort(self._waiting, request, key=_by_key)

    def _build(self, plan: dict[Request, int]) -> SchedulerOutput:
        """Turn the plan into rows, single tokens first, and move the requests on."""
        self._step_id += 1
        step = SchedulerOutput(self._step_id, [])
        order = [request for request, num_new in plan.items() if num_new == 1]
        order += [request for request, num_new in plan.items() if num_new > 1]
        for request in order:
            num_new = plan[request]
            start = request.num_computed
            samples = start + num_new == request.num_tokens
            new_pages = self.kv.new_page_ids(request)
            if request.is_new_row:
                step.new_rows.append(self._new_row(request, new_pages))
                new_pages = [[] for _ in new_pages]
                request.is_new_row = False
            if samples and request.bad_word_sequences:
                bans = request.banned_token_ids()
                if bans != request.sent_bans:
                    step.banned_token_ids[request.slot] = request.sent_bans = bans
            step.rows.append(ScheduledRow(request.slot, start, num_new, samples, new_pages, waits=samples and request.awaits_mask))
            request.num_in_flight += samples
            request.num_steps_in_flight += 1
            self.kv.advance(request, num_new)
        self._steps[step.step_id] = list(order)
        return step

    def _new_row(self, request: Request, page_ids: list[list[int]]) -> NewRow:
        return NewRow(
            slot=request.slot,
            request_id=request.request_id,
            prompt_len=request.prompt_len,
            token_ids=list(request.token_ids),
            sampling_params=request.params,
            seed=request.seed,
            page_ids=page_ids,
            pooling_params=request.pooling,
            second_start=request.second_start,
            encoder_token_ids=request.encoder_token_ids,
        )

    # ------------------------------------------------------------------ a step's results are in

    def update_from_output(self, step: SchedulerOutput, result: StepResult) -> list[EngineOutput]:
        """Commit the results of a step; returns what its requests bring to the front."""
        outputs = []
        self._counts.num_steps += 1
        self._counts.num_scheduled_tokens += step.num_tokens
        self._counts.num_padded_tokens += result.num_padded_tokens
        for request, row, row_result in zip(self._steps.pop(step.step_id), step.rows, result.rows, strict=True):
            if request is None:
                continue
            request.num_steps_in_flight -= 1
            request.num_in_flight -= row.samples
            try:
                output = self._commit_row(request, row, row_result)
            except Exception as error:
                logger.exception("the result of request %s could not be read", request.request_id)
                output = self._fail(request, f"the result of its step could not be read: {type(error).__name__}: {error}")
            if output is not None:
                outputs.append(output)
            if row.samples and request in self._suspects:
                # It ran alone and did well.
                self._suspects.remove(request)
        return outputs

    def _commit_row(self, request: Request, row: ScheduledRow, result: RowResult) -> EngineOutput | None:
        if request.status is Status.FINISHED and result.error is None:
            return None
        if result.error is not None or (row.samples and result.token_id is None and result.pooled is None):
            return self._fail(request, result.error or "its step brought nothing", result.error_kind)
        if self.pooling:
            output = self._finish(request, FinishReason.STOP)
            output.pooled = result.pooled
            return output
        if request.prompt_logprobs is not None and result.prompt_logprobs:
            have = len(request.prompt_logprobs)
            # A chunk that is computed again after preemption brings positions that are there already.
            request.prompt_logprobs += result.prompt_logprobs[max(0, have - row.start) :]
        if not row.samples:
            return None
        if request.prompt_logprobs is not None and len(request.prompt_logprobs) != request.prompt_len - 1:
            return self._fail(request, f"{len(request.prompt_logprobs)} of {request.prompt_len - 1} prompt logprobs came with its steps")
        token = result.token_id
        assert token is not None
        request.token_ids.append(token)
        if request.thinking is not None:
            request.thinking.accept(token)
        if request.grammar is not None and (failure := request.grammar.accept(token)) is not None:
            kind, error = failure
            return self._fail(request, f"the output grammar cannot be followed behind token {token}: {error}", kind)
        reason, stop_reason = self._reason_to_stop(request, token)
        output = self._output(request) if reason is None else self._finish(request, reason, stop_reason=stop_reason)
        output.new_token_ids = [token]
        output.grammar_complete = reason is FinishReason.STOP and stop_reason is None and token not in request.eos_ids
        if result.logprobs is not None:
            output.logprobs = [result.logprobs]
        return output

    def _reason_to_stop(self, request: Request, token: int) -> tuple[FinishReason | None, int | None]:
        if request.grammar is not None or request.num_outputs >= request.params.min_tokens:
            if token in request.eos_ids:
                return FinishReason.STOP, None
            if token in request.stop_ids:
                return FinishReason.STOP, token
        if request.grammar is not None and request.grammar.is_complete:
            return FinishReason.STOP, None
        if len(request.token_ids) >= request.max_total:
            return FinishReason.LENGTH, None
        return None, None

    def _output(self, request: Request) -> EngineOutput:
        """An output of the request; the first one carries what is told once."""
        output = EngineOutput(request_id=request.request_id, num_preemptions=request.num_preemptions)
        request.num_preemptions = 0
        if not request.sent_first_output:
            request.sent_first_output = True
            output.num_cached_tokens = request.num_cached_tokens
            output.first_scheduled_time = request.first_scheduled_time
            if request.prompt_logprobs is not None and len(request.prompt_logprobs) == request.prompt_len - 1:
                # They can be large, and a request that is computed again needs them no more.
                output.prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, None
        return output

    # ------------------------------------------------------------------ failures

    def _fail(self, request: Request, error: str, kind: ErrorKind = ErrorKind.FAILED) -> EngineOutput | None:
        """End one request with an error and keep what it computed away from others. None where it has ended already."""
        self.kv.forget(request)
        if request.status is Status.FINISHED:
            return None
        return self._finish(request, FinishReason.ERROR, error=error, kind=kind)

    def fail_step(self, step: SchedulerOutput, error: str) -> None:
        """A step failed as a whole: throw away its results and those of later steps in flight, which build on it.

        A request that was alone in the step ends with the error. Those that shared it become suspects: each is tried again by itself,
        so that only the one at fault ends.
        """
        if step.step_id not in self._steps:
            return
        steps, self._steps = self._steps, {}
        involved = dict.fromkeys(request for requests in steps.values() for request in requests if request is not None)
        culprit = steps[step.step_id][0] if len(step.rows) == 1 else None
        # Pages that the failed steps were to fill may have been found by others.
        self.kv.reset_prefix_cache()
        for request in involved:
            request.num_steps_in_flight = request.num_in_flight = 0
            if request.status is Status.FINISHED:
                continue
            if request is culprit:
                self._outputs.append(self._finish(request, FinishReason.ERROR, error=error, kind=ErrorKind.FAILED))
                continue
            if request.status is Status.WAITING:
                self._waiting.remove(request)
            self._release(request)
            request.status = Status.SUSPECT
            request.num_preemptions += 1
            if request not in self._suspects:
                self._suspects.append(request)
        self._suspects.sort(key=_by_key)

    def _plan_suspect(self, plan: dict[Request, int], request: Request) -> None:
        """The first suspect alone; the others keep their pages as long as it can do without."""
        budget = self.max_num_batched_tokens
        if request.status is Status.RUNNING:
            wanted = min(self._wanted(request), budget)
            num_new = 0 if wanted == 0 else self.kv.grow(request, wanted)
            while num_new == 0 < wanted:
                self._preempt(next(other for other in reversed(self._running) if other is not request))
                num_new = self.kv.grow(request, wanted)
        else:
            # Its slot is still free: nobody is let in while there are suspects.
            while not (num_new := self._admit(request, budget) or 0):
                self._preempt(self._running[-1])
        if num_new:
            plan[request] = num_new

    # ------------------------------------------------------------------ state for others to see

    def reset_prefix_cache(self) -> bool:
        """Forget every cached page; running requests go on. Always succeeds."""
        self.kv.reset_prefix_cache()
        return True

    def stats(self) -> SchedulerStats:
        """A snapshot; its counters start again from zero."""
        stats, self._counts = self._counts, SchedulerStats()
        stats.num_running = self.num_running
        stats.num_waiting = self.num_waiting
        stats.kv_cache_usage = self.kv.usage
        return stats
