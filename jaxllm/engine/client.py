"""How the front reaches an engine: in this process, or in one of its own. Both look the same."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from jaxllm.config import EngineConfig
from jaxllm.core_types import EngineInfo, EngineOutput, EngineOutputs, EngineRequest, ErrorKind
from jaxllm.engine import wire
from jaxllm.engine.core import EngineCore
from jaxllm.engine.process import EngineProcess
from jaxllm.errors import DeadlineExceededError, EngineDeadError, InvalidRequestError, JaxllmError, QueueFullError, RequestFailedError

# Where engine and runner are put together; a string, so that the engine process can import it.
DEFAULT_FACTORY = "jaxllm.launch:start_engine"


class EngineClient(Protocol):
    """What the front may ask of an engine.

    Requests are never refused by an exception: whatever is wrong with one arrives as an output with finish reason "error"
    (`error_from` makes the exception of it). Every request ends with exactly one output that has a finish reason, aborted ones too,
    unless the engine dies: then every call raises EngineDeadError. One consumer takes the outputs, in a thread or in an event loop;
    the other methods may be called from any thread.
    """

    info: EngineInfo

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request; its id must not be in use."""
        ...

    def add_requests(self, requests: Sequence[EngineRequest]) -> None:
        """Queue requests in this order, together."""
        ...

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """End requests now. Ids of requests that have ended are ignored."""
        ...

    def get_outputs(self, timeout: float | None = None) -> EngineOutputs:
        """Outputs of one step, in order; may be empty. A client in process runs the step here and returns at once without work;
        one with an engine process waits for a step, at most `timeout` seconds."""
        ...

    async def get_outputs_async(self) -> EngineOutputs:
        """As `get_outputs`, waiting in the event loop until there is something."""
        ...

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes, between two steps."""
        ...

    async def reset_prefix_cache_async(self) -> bool: ...

    async def start_profile_async(self, directory: str) -> bool:
        """Record a trace of the engine into `directory`; False where one is being recorded already."""
        ...

    async def stop_profile_async(self) -> bool:
        """Write the trace; False where none is being recorded."""
        ...

    def check_health(self) -> None:
        """Raises EngineDeadError where the engine is dead or shut down."""
        ...

    def shutdown(self) -> None:
        """Stop the engine and give back what it holds; safe to call again."""
        ...


def error_from(output: EngineOutput) -> JaxllmError | None:
    """The exception that stands for an output's error; None where it has none."""
    if output.error is None:
        return None
    if output.error_kind == ErrorKind.INVALID:
        return InvalidRequestError(output.error)
    if output.error_kind == ErrorKind.QUEUE_FULL:
        return QueueFullError(output.error)
    if output.error_kind == ErrorKind.DEADLINE:
        return DeadlineExceededError(output.error)
    return RequestFailedError(output.error)


class InprocClient:
    """An engine in this process. `get_outputs` is what makes it step.

    Args:
        core: a started engine.
        info: what it said of itself.
    """

    def __init__(self, core: EngineCore, info: EngineInfo):
        self.info = info
        self._core = core
        # Held while the core works. Requests and aborts must not wait for a step, so they wait in `_commands`.
        self._lock = threading.Lock()
        self._commands: deque[Callable[[], None]] = deque()
        self._dead: EngineDeadError | None = None
        self._closed = False
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def add_request(self, request: EngineRequest) -> None:
        self.add_requests([request])

    def add_requests(self, requests: Sequence[EngineRequest]) -> None:
        self.check_health()
        self._commands.extend(partial(self._core.add_request, request) for request in requests)
        self._wake()

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        self.check_health()
        self._commands.append(partial(self._core.abort_requests, list(request_ids)))
        self._wake()

    @property
    def has_work(self) -> bool:
        """Whether a step could bring anything."""
        return bool(self._commands) or self._core.has_work

    def get_outputs(self, timeout: float | None = None) -> EngineOutputs:
        return self.step()

    def step(self) -> EngineOutputs:
        """Carry out what was asked since the last step, then advance by one; returns at once where there is nothing to do."""
        with self._lock:
            self.check_health()
            while self._commands:
                self._commands.popleft()()
            if not self._core.has_work:
                return EngineOutputs()
            try:
                return self._core.step()
            except EngineDeadError as error:
                self._dead = error
                raise
            except Exception as error:
                self._dead = EngineDeadError(f"the engine stopped: {type(error).__name__}: {error}")
                raise self._dead from error

    async def get_outputs_async(self) -> EngineOutputs:
        loop = asyncio.get_running_loop()
        if self._waiter is None or self._waiter[0] is not loop:
            self._waiter = (loop, asyncio.Event())
        event = self._waiter[1]
        while True:
            event.clear()
            self.check_health()
            if self.has_work:
                return await asyncio.to_thread(self.step)
            await event.wait()

    def reset_prefix_cache(self) -> bool:
        return self._call(self._core.reset_prefix_cache)

    async def reset_prefix_cache_async(self) -> bool:
        return await asyncio.to_thread(self.reset_prefix_cache)

    async def start_profile_async(self, directory: str) -> bool:
        return await asyncio.to_thread(self._call, self._core.start_profile, directory)

    async def stop_profile_async(self) -> bool:
        return await asyncio.to_thread(self._call, self._core.stop_profile)

    def _call(self, method: Callable[..., bool], *args: str) -> bool:
        """Run a method of the core between two steps."""
        with self._lock:
            self.check_health()
            return method(*args)

    def check_health(self) -> None:
        if self._dead is not None:
            raise self._dead

    def shutdown(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._dead = self._dead or EngineDeadError("the engine has been shut down")
                self._core.shutdown()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None:
            loop, event = self._waiter
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)


class ProcessClient:
    """An engine in a process of its own, so that neither delays the other.

    A reader thread decodes what the engine sends, one message a step, and hands it to the consumer: a thread in `get_outputs`, or
    an event loop in `get_outputs_async`. The process ends with this object, with `shutdown`, or with this process, whichever comes
    first and however it comes.

    Args:
        config: the engine's options.
        factory: "module:function" that builds the engine in its process: (EngineConfig) -> (EngineCore, EngineInfo).
        wait: return when the engine is ready; otherwise at once, and `wait_ready` waits.
    Raises:
        ConfigError, ModelLoadError, OutOfMemoryPlanError, ...: what kept the engine from starting, as raised in its process.
        EngineDeadError: the process ended, or failed with an error of another type, before it was ready.
    """

    info: EngineInfo

    def __init__(self, config: EngineConfig, factory: str = DEFAULT_FACTORY, *, wait: bool = True):
        self._process = EngineProcess(factory, config)
        # Also at interpreter exit. The finalizer knows the process only, so that it does not keep this object alive.
        self._finalizer = weakref.finalize(self, self._process.close)
        if wait:
            try:
                self.info = self._process.ready.result()
            except BaseException:
                self._finalizer()
                raise

    async def wait_ready(self) -> EngineInfo:
        """Wait in the event loop until the engine is ready. Raises what the constructor raises."""
        try:
            # A waiter that is cancelled gives up waiting, not the start.
            self.info = await asyncio.shield(asyncio.wrap_future(self._process.ready))
        except asyncio.CancelledError:
            raise
        except BaseException:
            await asyncio.to_thread(self._finalizer)
            raise
        return self.info

    @property
    def pid(self) -> int | None:
        """Process id of the engine."""
        return self._process.pid

    def add_request(self, request: EngineRequest) -> None:
        self.add_requests([request])

    def add_requests(self, requests: Sequence[EngineRequest]) -> None:
        self._process.send(wire.encode_requests(requests))

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        self._process.send([wire.ToEngine.ABORT, wire.encode(list(request_ids))])

    def get_outputs(self, timeout: float | None = None) -> EngineOutputs:
        return self._process.inbox.get(timeout) or EngineOutputs()

    async def get_outputs_async(self) -> EngineOutputs:
        return await self._process.inbox.get_async()

    def reset_prefix_cache(self) -> bool:
        return self._process.call("reset_prefix_cache").result()

    async def reset_prefix_cache_async(self) -> bool:
        return await asyncio.wrap_future(self._process.call("reset_prefix_cache"))

    async def start_profile_async(self, directory: str) -> bool:
        return await asyncio.wrap_future(self._process.call("start_profile", directory))

    async def stop_profile_async(self) -> bool:
        return await asyncio.wrap_future(self._process.call("stop_profile"))

    def check_health(self) -> None:
        if self._process.inbox.dead is not None:
            raise self._process.inbox.dead

    def shutdown(self) -> None:
        self._finalizer()
