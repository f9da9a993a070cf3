"""Running the engine's generations of one HTTP request: one a prompt, as many as it has."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, Self, TypeVar

from starlette.requests import Request

from jaxllm.errors import DeadlineExceededError, InvalidRequestError, RequestFailedError
from jaxllm.outputs import PoolingRequestOutput, RequestOutput
from jaxllm.sampling_params import SamplingParams
from jaxllm.server.protocol import MAX_REQUEST_ID_CHARS
from jaxllm.server.responses import CompletionTokensDetails, PromptTokensDetails, Usage
from jaxllm.server.state import ServerState, Serving
from jaxllm.server.tracing import RequestTracer, trace_headers

logger = logging.getLogger(__name__)

TIMEOUT_HEADER = "X-Request-Timeout"
REQUEST_ID_HEADER = "X-Request-Id"


P = TypeVar("P")
Output = TypeVar("Output", RequestOutput, PoolingRequestOutput)


class EngineBody(Protocol):
    """What every request for the engine says of itself."""

    model: str | None
    request_id: str | None
    priority: int | None


class JobRequest(EngineBody, Protocol):
    """What every request that generates says beside its prompts and sampling parameters."""

    cache_salt: str | None

    @property
    def max_tokens(self) -> int | None: ...


@dataclass(slots=True)
class Prompt:
    """A prompt ready for the engine. `text` is None where the client sent token ids."""

    text: str | None
    token_ids: list[int]


@dataclass(kw_only=True)
class EngineJob(ABC, Generic[P, Output]):
    """One HTTP request's work for the engine, whatever that is."""

    serving: Serving
    response_id: str
    model: str
    prompts: Sequence[P]
    # When it came.
    started: float
    priority: int
    deadline: float | None
    # Parameters that the request names otherwise: parameter -> field.
    field_names: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def open(cls, state: ServerState, request: Request, body: EngineBody, *, prefix: str, **more: Any) -> Self:
        """Collect what the engine needs of a request. Raises InvalidRequestError for a bad time limit or request id."""
        now = time.time()
        return cls(
            serving=state.serving,
            response_id=f"{prefix}-{base_id(request, body)}",
            model=state.serving.model_name(body.model),
            started=now,
            priority=body.priority or 0,
            deadline=deadline_of(request, state.config.request_timeout, now),
            **more,
        )

    @property
    def created(self) -> int:
        return int(self.started)

    def start(self) -> list[AsyncGenerator[Output, None]]:
        """One stream of outputs a prompt; nothing runs before it is iterated."""
        # The client may use its own id again while the first request runs: the engine's ids must differ.
        base = f"{self.response_id}-{uuid.uuid4().hex[:8]}"
        return [self._one(f"{base}-{index}", prompt) for index, prompt in enumerate(self.prompts)]

    @abstractmethod
    def _one(self, request_id: str, prompt: P) -> AsyncGenerator[Output, None]:
        """The outputs of one prompt."""


@dataclass(kw_only=True)
class Job(EngineJob[Prompt, RequestOutput]):
    """Prompts to be completed."""

    params: SamplingParams
    cache_salt: str | None
    tracer: RequestTracer | None = None
    # What the request's headers say of the trace that it is part of.
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    # Tokens are generated but none is shown: a prompt is scored.
    scoring: bool = False

    async def _one(self, request_id: str, prompt: Prompt) -> AsyncGenerator[RequestOutput, None]:
        outputs = self.serving.engine.generate(
            {"prompt_token_ids": prompt.token_ids},
            self.params,
            request_id,
            priority=self.priority,
            cache_salt=self.cache_salt,
            deadline=self.deadline,
        )
        metrics, num_tokens = None, 0
        # An async generator is closed here and now, so that the engine drops the request; any other iterator has nothing to close.
        try:
            async for output in outputs:
                if self.tracer is not None:
                    metrics = output.metrics
                    num_tokens += sum(len(choice.token_ids) for choice in output.outputs)
                self._check(output)
                yield output
        except InvalidRequestError as error:
            raise error.renamed(self.field_names) from error
        finally:
            close = getattr(outputs, "aclose", None)
            if close is not None:
                await close()
            if self.tracer is not None:
                self.tracer.record(self, request_id, metrics, num_prompt_tokens=len(prompt.token_ids), num_tokens=num_tokens)

    def _check(self, output: RequestOutput) -> None:
        for choice in output.outputs:
            if choice.finish_reason == "error":
                raise RequestFailedError("the request failed in the engine")
            if choice.finish_reason == "abort" and self.deadline is not None and time.time() >= self.deadline:
                raise DeadlineExceededError("the request was not finished within its time limit")


def new_job(
    state: ServerState,
    request: Request,
    body: JobRequest,
    *,
    prefix: str,
    prompts: list[Prompt],
    params: SamplingParams,
    field_names: Mapping[str, str] | None = None,
) -> Job:
    """Collect what the engine needs of a request beside its prompts.

    Raises:
        InvalidRequestError: a bad time limit or request id.
    """
    job = Job.open(
        state,
        request,
        body,
        prefix=prefix,
        prompts=prompts,
        params=params,
        cache_salt=body.cache_salt,
        tracer=state.tracer,
        trace_headers=trace_headers(request.headers) if state.tracer is not None else {},
        scoring=body.max_tokens == 0,
        field_names=field_names or {},
    )
    if state.config.enable_log_requests:
        lengths = [len(prompt.token_ids) for prompt in prompts]
        logger.info("request %s: %d prompts of %s tokens, %.2000s", job.response_id, len(prompts), lengths[:16], params)
    return job


def base_id(request: Request, body: EngineBody) -> str:
    """What a response's id ends with: the name that the client gave the request, or a new one."""
    header = request.headers.get(REQUEST_ID_HEADER)
    name, given = (REQUEST_ID_HEADER, header) if header else ("request_id", body.request_id)
    if not given:
        return uuid.uuid4().hex
    if len(given) > MAX_REQUEST_ID_CHARS or not given.isprintable():
        raise InvalidRequestError(f"{name} may hold at most {MAX_REQUEST_ID_CHARS} printable characters, got {given!r:.300}", param=name)
    return given


def deadline_of(request: Request, limit: float | None, now: float) -> float | None:
    """When the request is given up: the server's limit, or less where the client asks for less."""
    asked = request.headers.get(TIMEOUT_HEADER)
    if asked is not None:
        try:
            seconds = float(asked)
        except ValueError:
            seconds = -1.0
        if not 0 < seconds < float("inf"):
            raise InvalidRequestError(f"{TIMEOUT_HEADER} must be a number of seconds above 0, got {asked!r:.100}", param=TIMEOUT_HEADER)
        limit = seconds if limit is None else min(limit, seconds)
    return None if limit is None else now + limit


async def final_outputs(streams: Sequence[AsyncGenerator[Output, None]]) -> list[Output]:
    """The last output of each stream, in order. The first failure ends the others."""
    last: dict[int, Output] = {}
    async with aclosing(merged(streams)) as outputs:
        async for number, output in outputs:
            last[number] = output
    if len(last) < len(streams) or not all(output.finished for output in last.values()):
        raise RequestFailedError("the engine ended the request without a result")
    return [last[number] for number in range(len(streams))]


async def merged(streams: Sequence[AsyncGenerator[Output, None]]) -> AsyncGenerator[tuple[int, Output], None]:
    """Outputs of all streams as they come, each with its stream's number. The first failure ends the others."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as stream:
            async for output in stream:
                yield 0, output
        return
    # One place per stream: a slow client holds them back, and the engine's side merges what comes meanwhile.
    queue: asyncio.Queue[tuple[int, Output | BaseException | None]] = asyncio.Queue(len(streams))
    tasks = [asyncio.create_task(_pump(number, stream, queue)) for number, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            number, item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield number, item
    finally:
        # Wait until what still runs is gone, so that nothing is left in the engine.
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(number: int, stream: AsyncGenerator[Output, None], queue: asyncio.Queue[tuple[int, Output | BaseException | None]]) -> None:
    try:
        async with aclosing(stream):
            async for output in stream:
                await queue.put((number, output))
    except Exception as error:
        await queue.put((number, error))
    else:
        await queue.put((number, None))


class UsageCounter:
    """Counts the tokens of one HTTP request over its prompts."""

    def __init__(self, job: Job):
        self._scoring = job.scoring
        self._cached: dict[int, int] = {}
        self._prompt_tokens = sum(len(prompt.token_ids) for prompt in job.prompts)
        self._completion_tokens = 0
        # Of the completion's tokens.
        self.reasoning_tokens = 0

    def add(self, prompt: int, output: RequestOutput) -> None:
        """Count the new tokens of an output of the prompt of this number."""
        if output.num_cached_tokens is not None:
            self._cached[prompt] = output.num_cached_tokens
        if not self._scoring:
            for choice in output.outputs:
                self._completion_tokens += len(choice.token_ids)

    def usage(self) -> Usage:
        total = self._prompt_tokens + self._completion_tokens
        cached = PromptTokensDetails(sum(self._cached.values()))
        return Usage(self._prompt_tokens, self._completion_tokens, total, cached, CompletionTokensDetails(self.reasoning_tokens))
