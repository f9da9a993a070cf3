"""The asynchronous API: `AsyncLLM`, over an engine in a process of its own. The server stands on it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from functools import partial
from typing import Any, Self

from jaxllm.config import EngineConfig
from jaxllm.core_types import EngineInfo, ErrorKind
from jaxllm.engine.client import DEFAULT_FACTORY, ProcessClient, error_from
from jaxllm.engine.front import Front, load_text_side
from jaxllm.engine.input_processor import ProcessedRequest, Prompt
from jaxllm.engine.metrics import LOG_INTERVAL, EngineMetrics
from jaxllm.engine.output_processor import PoolingState, RequestState
from jaxllm.engine.pooling_processor import Pair, PoolingPrompt
from jaxllm.errors import EngineDeadError, InvalidRequestError
from jaxllm.outputs import PoolingRequestOutput, RequestOutput
from jaxllm.pooling_params import PoolingParams
from jaxllm.sampling_params import SamplingParams
from jaxllm.weights.download import resolve_model

logger = logging.getLogger(__name__)

# Longer texts are tokenised in a thread, so that the event loop goes on.
_INLINE_CHARS = 8_192


class AsyncLLM:
    """A model to generate with, from one event loop.

    The constructor finds the model's files (fetching them where needed), loads the tokenizer and lets the engine's process start;
    `start()` waits until it serves.

    Args:
        model: Hugging Face directory, hub id or .gguf file; None is the embedded default model.
        config: complete options, instead of the model and others.
        metrics_prefix: what the metrics' names begin with.
        served_model_name: the metrics' label `model_name`, where it is not the model's own name.
        engine_factory: "module:function" that builds the engine in its process.
        options: every option of `EngineConfig`, by vLLM's names.

    Raises:
        ConfigError: an option that is unknown, not offered, or out of its range.
        ModelLoadError: the model's files cannot be found, or hold no usable tokenizer.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        config: EngineConfig | None = None,
        metrics_prefix: str = "jaxllm",
        served_model_name: str | None = None,
        engine_factory: str = DEFAULT_FACTORY,
        **options: Any,
    ):
        config = config or EngineConfig.from_options(model=model, **options)
        self.config = config
        files = resolve_model(config.model)
        self.model_name: str = files.name
        self._new_metrics = partial(EngineMetrics, model_name=served_model_name or files.name, prefix=metrics_prefix)
        self._client = ProcessClient(config, engine_factory)
        try:
            self.tokenizer, self._defaults = load_text_side(config.model, files)
        except BaseException:
            self._client.shutdown()
            raise
        self._front: Front | None = None
        self._streams: dict[str, _Stream] = {}
        self._starting: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._dead: EngineDeadError | None = None

    # --------------------------------------------------------------------------------------------------- life

    async def start(self) -> None:
        """Wait until the engine serves. Called again, does nothing.

        Raises:
            ConfigError, ModelLoadError, OutOfMemoryPlanError: what kept the engine from starting.
            EngineDeadError: its process ended.
        """
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
            # Where everybody has given up waiting, nobody wants to hear of the failure either.
            self._starting.add_done_callback(lambda task: task.cancelled() or task.exception())
        # One caller that gives up does not end the start for the others.
        await asyncio.shield(self._starting)

    async def _start(self) -> None:
        info = await self._client.wait_ready()
        metrics = self._new_metrics(info)
        self._front = Front(self.config, self.tokenizer, self._defaults, info, metrics)
        self._tasks = [asyncio.create_task(self._read_outputs(self._front)), asyncio.create_task(self._log_stats(metrics))]

    def shutdown(self) -> None:
        """Stop the engine and its process; open requests fail. From any thread; takes at most some seconds."""
        self._dead = self._dead or EngineDeadError("the engine has been shut down")
        self._client.shutdown()

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await asyncio.to_thread(self.shutdown)
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self.shutdown)

    async def check_health(self) -> None:
        """Raises EngineDeadError where the engine is dead or shut down."""
        if self._dead is not None:
            raise self._dead
        self._client.check_health()

    @property
    def info(self) -> EngineInfo:
        """What the started engine says of itself."""
        self._started()
        return self._client.info

    @property
    def metrics(self) -> EngineMetrics:
        """What the started engine did; `metrics.registry` is for Prometheus."""
        return self._started().metrics

    def _started(self) -> Front:
        if self._front is None:
            raise EngineDeadError("the engine has not started yet; await start() first")
        return self._front

    @property
    def default_sampling_params(self) -> dict[str, Any]:
        """SamplingParams fields for requests that do not set them: the model's generation config under its override."""
        return dict(self._defaults.sampling)

    # ---------------------------------------------------------------------------------------------- generating

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        deadline: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt, giving outputs as they come and as `sampling_params.output_kind` says.

        A reader that is slower than the engine gets fewer, larger outputs. Closing the iterator, or cancelling the task that reads it,
        aborts the request.

        Args:
            prompt: text, token ids, {"prompt": ...} or {"prompt_token_ids": ...}; the dicts may hold "cache_salt".
            request_id: of its own among the open requests; None makes one up.
            priority: lower first; needs scheduling_policy="priority".
            cache_salt: shares cached prefixes only with requests of the same salt.
            deadline: seconds since the epoch; what is not finished by then ends with finish reason "abort".

        Raises:
            InvalidRequestError: the request cannot be served.
            QueueFullError: too many requests wait.
            RequestFailedError: the engine failed this request.
            EngineDeadError: the engine ended.
        """
        options: dict[str, Any] = {"priority": priority, "cache_salt": cache_salt, "deadline": deadline}
        return self._outputs(lambda front: front.input.process, prompt, sampling_params, request_id, **options)

    def encode(
        self,
        prompt: PoolingPrompt,
        pooling_params: PoolingParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        deadline: float | None = None,
        add_special_tokens: bool = True,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Pool one prompt: gives one output. The prompt may be a `Pair` of texts for a cross-encoder.

        Closing the iterator, or cancelling the task that reads it, aborts the request.

        Raises:
            InvalidRequestError: the request cannot be served, or the model generates.
            QueueFullError, RequestFailedError, DeadlineExceededError, EngineDeadError: as `generate`; there is no output then.
        """
        options: dict[str, Any] = {"priority": priority, "deadline": deadline, "add_special_tokens": add_special_tokens}
        return self._outputs(lambda front: front.pooling.process, prompt, pooling_params, request_id, **options)

    async def _outputs(
        self, process_of: Callable[[Front], Callable[..., ProcessedRequest]], prompt: Any, params: Any, request_id: str | None, **more: Any
    ) -> AsyncGenerator[Any, None]:
        """Check a request, send it to the engine and give its outputs; one that has not ended is dropped at the end."""
        await self.start()
        front, request_id = self._started(), uuid.uuid4().hex if request_id is None else request_id
        request = await _checked(process_of(front), request_id, prompt, params, **more)
        if self._dead is not None:
            raise self._dead
        if front.output.knows(request):
            raise InvalidRequestError(f"request id {request_id!r} is in use; choose another", param="request_id")
        stream = self._streams[request_id] = _Stream(front.open(request))
        try:
            self._client.add_requests(request.children)
            while True:
                output = await stream.next()
                if output is not None:
                    yield output
                    if output.finished:
                        return
        finally:
            del self._streams[request_id]
            self._drop(request_id)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests: their iterators give a last output with finish reason "abort". Ids that are not open are ignored."""
        for one in [request_id] if isinstance(request_id, str) else request_id:
            self._drop(one)
            if one in self._streams:
                self._streams[one].wake()

    def _drop(self, request_id: str) -> None:
        """Let the engine forget a request that has not ended."""
        engine_ids = self._started().abort(request_id)
        if engine_ids:
            with contextlib.suppress(EngineDeadError):
                self._client.abort_requests(engine_ids)

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; running requests go on and nothing of theirs is found later. True: it always can."""
        await self.start()
        return await self._client.call("reset_prefix_cache")

    async def start_profile(self, directory: str) -> bool:
        """Record a trace of the engine's process into `directory`, until `stop_profile`. False where one is being recorded already."""
        await self.start()
        return await self._client.call("start_profile", directory)

    async def stop_profile(self) -> bool:
        """Write the trace. False where none is being recorded."""
        await self.start()
        return await self._client.call("stop_profile")

    # ------------------------------------------------------------------------------------------- reading outputs

    async def _read_outputs(self, front: Front) -> None:
        """Hand every output of the engine to its request, until the engine ends."""
        try:
            while True:
                progress = front.take(await self._client.get_outputs())
                if progress.aborts:
                    self._client.abort_requests(list(progress.aborts))
                for state in progress.updated:
                    stream = self._streams.get(state.request_id)
                    if stream is not None:
                        stream.wake()
                # Outputs may wait already: the readers of these come first.
                await asyncio.sleep(0)
        except EngineDeadError as error:
            self._end(error)
        except asyncio.CancelledError:
            self._end(EngineDeadError("the event loop of this engine was closed"))
            raise
        except Exception as error:
            logger.exception("reading the engine's outputs failed")
            self._end(EngineDeadError(f"the front failed: {type(error).__name__}: {error}"))

    async def _log_stats(self, metrics: EngineMetrics) -> None:
        while self._dead is None:
            await asyncio.sleep(LOG_INTERVAL)
            metrics.log_stats()

    def _end(self, error: EngineDeadError) -> None:
        if self._dead is None:
            logger.critical("no more requests are served: %s", error)
        self._dead = error
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        for stream in self._streams.values():
            stream.fail(error)


class _Stream:
    """The reading end of one request: waits until its state has something to take."""

    def __init__(self, state: RequestState):
        self.state = state
        self._changed = asyncio.Event()
        self._error: EngineDeadError | None = None

    def wake(self) -> None:
        self._changed.set()

    def fail(self, error: EngineDeadError) -> None:
        self._error = error
        self._changed.set()

    async def next(self) -> Any:
        """What came since the last call, an output of the request's kind; None where there is nothing to give yet. Raises what ended the
        request or the engine.
        """
        await self._changed.wait()
        self._changed.clear()
        failure = self.state.failure
        # What was generated by a deadline is given out; of a vector there is no part.
        if failure is not None and (failure.error_kind != ErrorKind.DEADLINE or isinstance(self.state, PoolingState)):
            error = error_from(failure)
            if error is not None:
                raise error
        output = self.state.take()
        if self._error is not None and not self.state.finished:
            # What still came before the engine's end is given out first.
            if output is None:
                raise self._error
            self._changed.set()
        return output


async def _checked(process: Callable[..., ProcessedRequest], request_id: str, prompt: Any, params: Any, **options: Any) -> ProcessedRequest:
    """Check a request; a long text is tokenised, and a grammar compiled, in a thread."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    texts = [text] if isinstance(text, str) else text if isinstance(text, Pair) else ()
    if sum(map(len, texts)) > _INLINE_CHARS or getattr(params, "structured_outputs", None) is not None:
        return await asyncio.to_thread(process, request_id, prompt, params, **options)
    return process(request_id, prompt, params, **options)
