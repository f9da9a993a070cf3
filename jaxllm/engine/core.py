"""The step loop: schedule, execute, commit."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from jaxllm.core_types import EngineOutput, EngineOutputs, EngineRequest, ErrorKind, Executor, FinishReason, SchedulerOutput, StepHandle
from jaxllm.engine.scheduler import Scheduler
from jaxllm.errors import EngineDeadError, InvalidRequestError, QueueFullError

logger = logging.getLogger(__name__)

# Steps that may fail in a row before the device counts as lost.
MAX_FAILED_STEPS = 8
# Raised by the host over a value that it cannot use: that is one request's doing and says nothing about the device.
_OVER_VALUES = (ValueError, TypeError, LookupError, ArithmeticError)

# Seconds that an idle loop waits for a grammar to be compiled before it looks for other work.
GRAMMAR_WAIT = 0.005

_Enqueued = tuple[SchedulerOutput, StepHandle]


class EngineCore:
    """Runs requests to their end, one `step()` at a time.

    What goes wrong with one request ends that request; `step` raises only `EngineDeadError`.

    Args:
        scheduler: decides the steps.
        executor: runs them.
        async_scheduling: enqueue step n + 1 before reading the results of step n, so that the device never waits for the host.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, *, async_scheduling: bool = True):
        self.scheduler = scheduler
        self.executor = executor
        self._in_flight: _Enqueued | None = None
        self._advance: Callable[[], list[EngineOutput]] = self._advance_overlapped if async_scheduling else self._advance_plain
        self._refusals: list[EngineOutput] = []
        self._failed_steps = 0
        self._waited = 0.0

    @property
    def has_work(self) -> bool:
        return self._in_flight is not None or self.scheduler.has_work or bool(self._refusals)

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request. One that is refused gets its error as an output of the next step."""
        try:
            self.scheduler.add(request)
        except Exception as error:
            if not isinstance(error, (InvalidRequestError, QueueFullError)):
                logger.exception("request %s could not be added", request.request_id)
            self.refuse(request.request_id, error)

    def refuse(self, request_id: str, error: Exception) -> None:
        """End a request that was not accepted: the error is its only output, delivered with the next step."""
        if isinstance(error, QueueFullError):
            kind = ErrorKind.QUEUE_FULL
        else:
            kind = ErrorKind.INVALID if isinstance(error, InvalidRequestError) else ErrorKind.FAILED
        output = EngineOutput(request_id=request_id, finish_reason=FinishReason.ERROR, error=str(error), error_kind=kind)
        self._refusals.append(output)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests now; each gets a last output with reason abort. Ids that are not open are ignored."""
        self.scheduler.abort(request_ids)

    def reset_prefix_cache(self) -> bool:
        return self.scheduler.reset_prefix_cache()

    def start_profile(self, directory: str) -> bool:
        """Record a trace of what device and host do, into `directory`. False where one is being recorded already."""
        return self.executor.start_profile(directory)

    def stop_profile(self) -> bool:
        """Write the trace. False where none is being recorded."""
        return self.executor.stop_profile()

    def step(self) -> EngineOutputs:
        """Advance by one step. Raises EngineDeadError where steps keep failing."""
        started, self._waited = time.perf_counter(), 0.0
        outputs = self._advance() + self.scheduler.take_outputs() + self._refusals
        self._refusals = []
        stats = self.scheduler.stats()
        stats.host_seconds = time.perf_counter() - started - self._waited
        return EngineOutputs(outputs=outputs, stats=stats)

    def _advance_plain(self) -> list[EngineOutput]:
        step = self._schedule()
        if step is None:
            return []
        enqueued, error = self._enqueue(step)
        if enqueued is not None:
            error = self._sample_waiting(enqueued)
        if error is not None:
            return self._fail(step, error)
        assert enqueued is not None
        return self._commit(enqueued)

    def _advance_overlapped(self) -> list[EngineOutput]:
        step = self.scheduler.schedule()
        enqueued, error = self._enqueue(step) if step is not None else (None, None)
        previous, self._in_flight = self._in_flight, enqueued
        outputs = self._commit(previous) if previous is not None else []
        if self._in_flight is not None and (error := self._sample_waiting(self._in_flight)) is not None:
            self._in_flight = None
        if step is not None and error is not None:
            outputs += self._fail(step, error)
        return outputs

    def _sample_waiting(self, enqueued: _Enqueued) -> Exception | None:
        """Find out what rows may sample that wait for it, while the device computes the step. Returns what went wrong."""
        step, handle = enqueued
        try:
            masks = self.scheduler.masks(step)
            if masks:
                handle.sample(masks)
        except Exception as error:
            logger.exception("rows of step %d could not be sampled", step.step_id)
            return error
        return None

    def _schedule(self) -> SchedulerOutput | None:
        step = self.scheduler.schedule()
        if step is None and self._in_flight is None:
            self.scheduler.await_grammars(GRAMMAR_WAIT)
            step = self.scheduler.schedule()
        return step

    def _enqueue(self, step: SchedulerOutput) -> tuple[_Enqueued | None, Exception | None]:
        try:
            return (step, self.executor.execute(step)), None
        except Exception as error:
            logger.exception("step %d of %d rows could not be started", step.step_id, len(step.rows))
            return None, error

    def _commit(self, enqueued: _Enqueued) -> list[EngineOutput]:
        step, handle = enqueued
        before = time.perf_counter()
        try:
            result = handle.result()
        except Exception as error:
            logger.exception("step %d of %d rows failed", step.step_id, len(step.rows))
            # A step that was enqueued behind it used what this one left on the device.
            self._in_flight = None
            return self._fail(step, error)
        finally:
            self._waited = time.perf_counter() - before
        self._failed_steps = 0
        return self.scheduler.update_from_output(step, result)

    def _fail(self, step: SchedulerOutput, error: Exception) -> list[EngineOutput]:
        cause = f"{type(error).__name__}: {error}"
        self._failed_steps += not isinstance(error, _OVER_VALUES)
        if self._failed_steps >= MAX_FAILED_STEPS:
            raise EngineDeadError(f"{self._failed_steps} steps failed one after the other, the last one with {cause}")
        self.scheduler.fail_step(step, cause)
        return []

    def shutdown(self) -> None:
        self.executor.shutdown()
