"""How the front reaches an engine: in this process, or in one of its own.

Requests are never refused by an exception: whatever is wrong with one arrives as an output with finish reason "error" (`error_from` makes
the exception of it). Every request ends with exactly one output that has a finish reason, aborted ones too, unless the engine dies: then
every call raises EngineDeadError.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Sequence

from jaxllm.config import EngineConfig
from jaxllm.core_types import EngineInfo, EngineOutput, EngineOutputs, EngineRequest, ErrorKind
from jaxllm.engine import wire
from jaxllm.engine.core import EngineCore
from jaxllm.engine.process import EngineProcess
from jaxllm.errors import DeadlineExceededError, EngineDeadError, InvalidRequestError, JaxllmError, QueueFullError, RequestFailedError

# Where engine and runner are put together; a string, so that the engine process can import it.
DEFAULT_FACTORY = "jaxllm.launch:start_engine"

_ERRORS: dict[ErrorKind | None, type[JaxllmError]] = {
    ErrorKind.INVALID: InvalidRequestError,
    ErrorKind.QUEUE_FULL: QueueFullError,
    ErrorKind.DEADLINE: DeadlineExceededError,
}


def error_from(output: EngineOutput) -> JaxllmError | None:
    """The exception that stands for an output's error; None where it has none."""
    return None if output.error is None else _ERRORS.get(output.error_kind, RequestFailedError)(output.error)


class InprocClient:
    """An engine in this process, which one thread steps; any thread may end it.

    Args:
        core: a started engine.
        info: what it said of itself.
    """

    def __init__(self, core: EngineCore, info: EngineInfo):
        self.info = info
        self._core = core
        # Held while the core works.
        self._lock = threading.RLock()
        self._dead: EngineDeadError | None = None

    def add_requests(self, requests: Sequence[EngineRequest]) -> None:
        """Queue requests in this order; their ids must not be in use."""
        with self._lock:
            self.check_health()
            for request in requests:
                self._core.add_request(request)

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """End requests now. Ids of requests that have ended are ignored."""
        with self._lock:
            self.check_health()
            self._core.abort_requests(request_ids)

    @property
    def has_work(self) -> bool:
        """Whether a step could bring anything."""
        return self._core.has_work

    def step(self) -> EngineOutputs:
        """Advance by one step; returns at once where there is nothing to do."""
        with self._lock:
            self.check_health()
            try:
                return self._core.step() if self._core.has_work else EngineOutputs()
            except EngineDeadError as error:
                self._dead = error
                raise
            except Exception as error:
                self._dead = EngineDeadError(f"the engine stopped: {type(error).__name__}: {error}")
                raise self._dead from error

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes, between two steps."""
        with self._lock:
            self.check_health()
            return self._core.reset_prefix_cache()

    def check_health(self) -> None:
        """Raises EngineDeadError where the engine is dead or shut down."""
        if self._dead is not None:
            raise self._dead

    def shutdown(self) -> None:
        """Stop the engine and give back what it holds."""
        with self._lock:
            self._dead = self._dead or EngineDeadError("the engine has been shut down")
            self._core.shutdown()


class ProcessClient:
    """An engine in a process of its own, so that neither delays the other.

    A reader thread decodes what the engine sends, one message a step, and hands it to the one consumer in an event loop; the other methods
    may be called from any thread. The process ends with this object, with `shutdown`, or with this process, whichever comes first and
    however it comes. The constructor returns at once; `wait_ready` waits for the engine.

    Args:
        config: the engine's options.
        factory: "module:function" that builds the engine in its process: (EngineConfig) -> (EngineCore, EngineInfo).
    """

    info: EngineInfo

    def __init__(self, config: EngineConfig, factory: str = DEFAULT_FACTORY):
        self._process = EngineProcess(factory, config)
        # Also at interpreter exit. The finalizer knows the process only, so that it does not keep this object alive.
        self._finalizer = weakref.finalize(self, self._process.close)

    async def wait_ready(self) -> EngineInfo:
        """Wait until the engine is ready.

        Raises:
            ConfigError, ModelLoadError, OutOfMemoryPlanError, ...: what kept the engine from starting, as raised in its process.
            EngineDeadError: the process ended, or failed with an error of another type, before it was ready.
        """
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

    def add_requests(self, requests: Sequence[EngineRequest]) -> None:
        """Queue requests in this order, together; their ids must not be in use."""
        self._process.send(wire.encode_requests(requests))

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """End requests now. Ids of requests that have ended are ignored."""
        self._process.send([wire.ToEngine.ABORT, wire.encode(list(request_ids))])

    async def get_outputs(self) -> EngineOutputs:
        """Wait for the outputs of a step."""
        return await self._process.inbox.get()

    async def call(self, name: str, *args: str) -> bool:
        """Run a method of the core, between two steps: reset_prefix_cache, start_profile or stop_profile."""
        return await asyncio.wrap_future(self._process.call(name, *args))

    def check_health(self) -> None:
        """Raises EngineDeadError where the engine is dead or shut down."""
        if self._process.inbox.dead is not None:
            raise self._process.inbox.dead

    def shutdown(self) -> None:
        """Stop the engine and its process; safe to call again."""
        self._finalizer()
