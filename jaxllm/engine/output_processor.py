"""From what the engine gives to what a user takes: token ids become text and log-probabilities, n sequences become one request.

State is pulled, not pushed: the engine's outputs are folded into each request as they come, and `RequestState.take()` builds a
`RequestOutput` of everything that came since the last one. A slow reader therefore gets fewer and larger outputs, and nothing queues up.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jaxllm.core_types import EngineOutput, ErrorKind, FinishReason, Pooled, TokenLogprobs
from jaxllm.engine.detokenizer import IncrementalDetokenizer
from jaxllm.engine.input_processor import ProcessedRequest
from jaxllm.outputs import (
    CompletionOutput,
    Logprob,
    PoolingOutput,
    PoolingRequestOutput,
    PromptLogprobs,
    RequestMetrics,
    RequestOutput,
    SampleLogprobs,
)
from jaxllm.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from jaxllm.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# The text of a single token.
TextOf = Callable[[int], str]


@dataclass(slots=True)
class Progress:
    """What a round of engine outputs changed: requests with something to take, and sequences that have ended here although the engine
    goes on with them (engine id -> why).
    """

    updated: list[RequestState] = field(default_factory=list)
    aborts: dict[str, FinishReason] = field(default_factory=dict)


class _Sequence:
    """One of the n sequences: what came since the last `take`, or since the start where outputs are cumulative."""

    def __init__(self, index: int, engine_id: str, params: SamplingParams, detokenizer: IncrementalDetokenizer):
        self.index = index
        self.engine_id = engine_id
        self.params = params
        self.detokenizer = detokenizer
        self.token_ids: list[int] = []
        self.text = ""
        self.logprobs: SampleLogprobs | None = None if params.logprobs is None and params.logprob_token_ids is None else []
        self.cumulative_logprob: float | None = None if self.logprobs is None else 0.0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.fresh = False

    def append(self, output: EngineOutput, texts: TextOf) -> None:
        """Fold in what one step brought. A stop string found here ends the sequence, although the engine does not know yet."""
        token_ids = output.new_token_ids
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        before = len(self.detokenizer.token_ids)
        stop = self.detokenizer.update(token_ids, stop_terminated=output.finish_reason is FinishReason.STOP and not output.grammar_complete)
        if stop is not None:
            # Tokens behind the one that completed the stop string are no part of the output.
            token_ids = token_ids[: len(self.detokenizer.token_ids) - before]
            self.finish_reason, self.stop_reason = FinishReason.STOP, stop
        self.token_ids += token_ids
        if self.logprobs is not None and output.logprobs is not None:
            shown = texts if self.params.detokenize else None
            ranked = self.params.logprob_token_ids is None
            for entry in output.logprobs[: len(token_ids)]:
                self.logprobs.append(_logprob_dict(entry, shown, ranked))
                self.cumulative_logprob = (self.cumulative_logprob or 0.0) + entry.logprobs[0]
        self.fresh = True

    def take(self, delta: bool) -> CompletionOutput:
        self.text += self.detokenizer.next_delta(finished=self.finish_reason is not None)
        output = CompletionOutput(
            index=self.index,
            text=self.text,
            token_ids=self.token_ids,
            cumulative_logprob=self.cumulative_logprob,
            logprobs=self.logprobs,
            finish_reason=None if self.finish_reason is None else self.finish_reason.value,
            stop_reason=self.stop_reason,
        )
        self.fresh = False
        if delta:
            self.text, self.token_ids, self.logprobs = "", [], None if self.logprobs is None else []
        elif self.finish_reason is None:
            # The reader keeps what it took while we go on appending.
            self.token_ids, self.logprobs = self.token_ids.copy(), None if self.logprobs is None else self.logprobs.copy()
        return output


class RequestState:
    """One open request. `take()` gives what is new; `failure` is the engine's output that says why it failed, if it did."""

    def __init__(self, request: ProcessedRequest, tokenizer: Tokenizer):
        self.request_id = request.request_id
        self.prompt = request.prompt
        self.prompt_token_ids = request.prompt_token_ids
        self.encoder_prompt = request.encoder_prompt
        self.encoder_prompt_token_ids = request.encoder_prompt_token_ids
        self.params = request.sampling_params
        self.metrics = RequestMetrics(arrival_time=request.arrival_time)
        self.num_cached_tokens: int | None = None
        self.num_generated_tokens = 0
        self.failure: EngineOutput | None = None
        self._kind = self.params.output_kind
        self._prompt_logprobs: PromptLogprobs | None = None
        self._sequences = {
            child.request_id: _Sequence(
                index,
                child.request_id,
                child.sampling_params,
                IncrementalDetokenizer(tokenizer, request.prompt_token_ids, child.sampling_params),
            )
            for index, child in enumerate(request.children)
        }
        self._num_open = len(self._sequences)

    @property
    def finished(self) -> bool:
        return self._num_open == 0

    @property
    def engine_ids(self) -> list[str]:
        return list(self._sequences)

    def append(self, output: EngineOutput, texts: TextOf, now: float) -> bool:
        """Fold in one engine output at time `now` (seconds since the epoch). Returns whether a stop string ended its sequence."""
        sequence = self._sequences[output.request_id]
        if sequence.finish_reason is not None:
            # The overlapped loop was a token ahead of a stop string or an abort.
            return False
        if output.num_cached_tokens is not None and self.num_cached_tokens is None:
            self.num_cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs is not None and self._prompt_logprobs is None:
            shown = texts if self.params.detokenize else None
            self._prompt_logprobs = [None, *(_logprob_dict(entry, shown, True) for entry in output.prompt_logprobs)]
        metrics = self.metrics
        if output.first_scheduled_time is not None and metrics.first_scheduled_time is None:
            metrics.first_scheduled_time = output.first_scheduled_time
        metrics.num_preemptions += output.num_preemptions
        if output.new_token_ids:
            if metrics.first_token_time is None:
                metrics.first_token_time = now
            metrics.last_token_time = now
            self.num_generated_tokens += len(output.new_token_ids)
        sequence.append(output, texts)
        if output.error is not None and self.failure is None:
            self.failure = output
        if sequence.finish_reason is None:
            return False
        self._num_open -= 1
        if self._num_open == 0:
            metrics.finished_time = now
        return output.finish_reason is None

    def abort(self, now: float) -> list[str]:
        """End every open sequence with finish reason "abort". Returns their engine ids."""
        return self._end(FinishReason.ABORT, now)

    def fail(self, error: str, now: float) -> list[str]:
        """End every open sequence with finish reason "error". Returns their engine ids."""
        self.failure = EngineOutput(request_id=self.request_id, finish_reason=FinishReason.ERROR, error=error, error_kind=ErrorKind.FAILED)
        return self._end(FinishReason.ERROR, now)

    def _end(self, reason: FinishReason, now: float) -> list[str]:
        ended = [sequence for sequence in self._sequences.values() if sequence.finish_reason is None]
        for sequence in ended:
            sequence.finish_reason, sequence.fresh = reason, True
        self._num_open = 0
        if ended:
            self.metrics.finished_time = now
        return [sequence.engine_id for sequence in ended]

    def take(self) -> RequestOutput | PoolingRequestOutput | None:
        """What is new since the last call, as the request's output kind says; None where there is nothing to give yet."""
        delta = self._kind == RequestOutputKind.DELTA
        if self._kind == RequestOutputKind.FINAL_ONLY and not self.finished:
            return None
        sequences = list(self._sequences.values())
        fresh = [sequence for sequence in sequences if sequence.fresh]
        if not fresh:
            return None
        prompt_logprobs = self._prompt_logprobs
        if delta:
            self._prompt_logprobs = None
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=[sequence.take(delta) for sequence in (fresh if delta else sequences)],
            finished=self.finished,
            metrics=self.metrics,
            num_cached_tokens=self.num_cached_tokens,
            error=None if self.failure is None else self.failure.error,
            encoder_prompt=self.encoder_prompt,
            encoder_prompt_token_ids=self.encoder_prompt_token_ids,
        )


class PoolingState(RequestState):
    """One open pooling request: it has one output, or a `failure`."""

    _pooled: Pooled | None = None

    def append(self, output: EngineOutput, texts: TextOf, now: float) -> bool:
        self._pooled = output.pooled
        if output.pooled is None and output.error is None:
            self.abort(now)
            return False
        return super().append(output, texts, now)

    def abort(self, now: float) -> list[str]:
        return self.fail("the request was aborted", now)

    def take(self) -> PoolingRequestOutput | None:
        """The answer, once; None where there is none (yet)."""
        pooled, self._pooled = self._pooled, None
        if pooled is None:
            return None
        return PoolingRequestOutput(
            self.request_id, PoolingOutput(pooled.array), self.prompt_token_ids, prompt=self.prompt, metrics=self.metrics
        )


class OutputProcessor:
    """Every open request, by the ids that the engine knows its sequences under."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._texts = tokenizer.token_text
        self._requests: dict[str, RequestState] = {}
        self._by_engine_id: dict[str, RequestState] = {}

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def num_open_sequences(self) -> int:
        return len(self._by_engine_id)

    def knows(self, request: ProcessedRequest) -> bool:
        """Whether an open request already bears this one's id, or a sequence of it does."""
        return request.request_id in self._requests or any(child.request_id in self._by_engine_id for child in request.children)

    def add(self, request: ProcessedRequest) -> RequestState:
        pools = request.pooling_params is not None
        state = (PoolingState if pools else RequestState)(request, self._tokenizer)
        self._requests[state.request_id] = state
        for engine_id in state.engine_ids:
            self._by_engine_id[engine_id] = state
        return state

    def process(self, outputs: Iterable[EngineOutput], now: float | None = None) -> Progress:
        """Fold in what the engine sent. Outputs of requests that are no longer open are dropped."""
        now = time.time() if now is None else now
        updated: dict[str, RequestState] = {}
        progress = Progress()
        for output in outputs:
            state = self._by_engine_id.get(output.request_id)
            if state is None:
                continue
            updated[state.request_id] = state
            try:
                if state.append(output, self._texts, now):
                    progress.aborts[output.request_id] = FinishReason.STOP
            except Exception as error:
                # One request's text must not be the end of all others.
                logger.exception("the output of request %s could not be processed", state.request_id)
                failed = state.fail(f"its output could not be processed: {type(error).__name__}: {error}", now)
                progress.aborts |= dict.fromkeys(failed, FinishReason.ERROR)
        for state in updated.values():
            if state.finished:
                self._forget(state)
        progress.updated = list(updated.values())
        return progress

    def abort(self, request_id: str, now: float | None = None) -> list[str]:
        """End a request, if it is open. Returns the engine ids that the engine should drop."""
        state = self._requests.get(request_id)
        if state is None:
            return []
        engine_ids = state.abort(time.time() if now is None else now)
        self._forget(state)
        return engine_ids

    def _forget(self, state: RequestState) -> None:
        self._requests.pop(state.request_id, None)
        for engine_id in state.engine_ids:
            self._by_engine_id.pop(engine_id, None)


def _logprob_dict(entry: TokenLogprobs, texts: TextOf | None, ranked: bool) -> dict[int, Logprob]:
    """Token id -> Logprob, the sampled (or prompt) token first. `ranked`: the others are the top tokens, best first."""
    ids, logprobs = entry.token_ids, entry.logprobs
    chosen = ids[0]
    result = {chosen: Logprob(logprobs[0], entry.rank, texts(chosen) if texts else None)}
    for index in range(1, len(ids)):
        token = ids[index]
        if token != chosen:
            result[token] = Logprob(logprobs[index], index if ranked else None, texts(token) if texts else None)
    return result
