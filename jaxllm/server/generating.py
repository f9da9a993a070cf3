"""Running the engine's generations of one HTTP request: one a prompt, as many as it has."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

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


Output = TypeVar("Output", RequestOutput, PoolingRequestOutput)


class NamedRequest(Protocol):
    """What every request says of itself."""

    model: str | None
    request_id: str | None


class JobRequest(NamedRequest, Protocol):
    """What every request that generates says beside its prompts and sampling parameters."""

    priority: int | None
    cache_salt: str | None

    @property
    def max_tokens(self) -> int | None: ...


@dataclass(slots=True)
class Prompt:
    """A prompt ready for the engine. `text` is None where the client sent token ids."""

    text: str | None
    token_ids: list[int]


@dataclass(slots=True)
class Job:
    """One HTTP request's work for the engine."""

    serving: Serving
    response_id: str
    model: str
    created: int
    prompts: list[Prompt]
    params: SamplingParams
    priority: int
    cache_salt: str | None
    deadline: float | None
    # When it came, and what its headers say of the trace that it is part of.
    started: float
    tracer: RequestTracer | None = None
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    # Tokens are generated but none is shown: a prompt is scored.
    scoring: bool = False
    # Sampling parameters that the request names otherwise: parameter -> field.
    field_names: Mapping[str, str] = field(default_factory=dict)

    def start(self) -> list[AsyncGenerator[RequestOutput, None]]:
        """One stream of outputs a prompt; nothing runs before it is iterated."""
        # The client may use its own id again while the first request runs: the engine's ids must differ.
        base = f"{self.response_id}-{uuid.uuid4().hex[:8]}"
        return [self._one(f"{base}-{index}", prompt) for index, prompt in enumerate(self.prompts)]

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
            raise self._in_fields_of_the_request(error) from error
        finally:
            close = getattr(outputs, "aclose", None)
            if close is not None:
                await close()
            if self.tracer is not None:
                self.tracer.record(self, request_id, metrics, num_prompt_tokens=len(prompt.token_ids), num_tokens=num_tokens)

    def _in_fields_of_the_request(self, error: InvalidRequestError) -> InvalidRequestError:
        name = self.field_names.get(error.param or "")
        if name is None:
            return error
        return type(error)(str(error).replace(str(error.param), name, 1), param=name, value=error.value)

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
    serving = state.serving
    now = time.time()
    job = Job(
        serving=serving,
        response_id=f"{prefix}-{base_id(request, body)}",
        model=serving.model_name(body.model),
        created=int(now),
        prompts=prompts,
        params=params,
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
        deadline=deadline_of(request, state.config.request_timeout, now),
        started=now,
        tracer=state.tracer,
        trace_headers=trace_headers(request.headers) if state.tracer is not None else {},
        scoring=body.max_tokens == 0,
        field_names=field_names or {},
    )
    if state.config.enable_log_requests:
        lengths = [len(prompt.token_ids) for prompt in prompts]
        logger.info("request %s: %d prompts of %s tokens, %s", job.response_id, len(prompts), lengths[:16], params)
    return job


def base_id(request: Request, body: NamedRequest) -> str:
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


async def collect(job: Job) -> list[RequestOutput]:
    """The final output of every prompt, in order. The first failure ends the others."""
    return await final_outputs(job.start())


async def final_outputs(streams: Sequence[AsyncGenerator[Output, None]]) -> list[Output]:
    """The last output of each stream, in order. The first failure ends the others."""
    if len(streams) == 1:
        return [await _final(streams[0])]
    tasks = [asyncio.create_task(_final(stream)) for stream in streams]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await _cancel(tasks)


async def _final(stream: AsyncGenerator[Output, None]) -> Output:
    last: Output | None = None
    async with aclosing(stream):
        async for output in stream:
            last = output
    if last is None or not last.finished:
        raise RequestFailedError("the engine ended the request without a result")
    return last


async def merged(job: Job) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Outputs of all prompts as they come, each with the prompt's number. The first failure ends the others."""
    streams = job.start()
    if len(streams) == 1:
        async with aclosing(streams[0]) as stream:
            async for output in stream:
                yield 0, output
        return
    # One place per prompt: a slow client holds its streams back, and the engine's side merges what comes meanwhile.
    queue: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue(len(streams))
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
        await _cancel(tasks)


async def _pump(
    number: int, stream: AsyncGenerator[RequestOutput, None], queue: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]]
) -> None:
    try:
        async with aclosing(stream):
            async for output in stream:
                await queue.put((number, output))
    except Exception as error:
        await queue.put((number, error))
    else:
        await queue.put((number, None))


async def _cancel(tasks: Sequence[asyncio.Task[object]]) -> None:
    """Cancel what still runs and wait until it is gone, so that nothing is left in the engine."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


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
