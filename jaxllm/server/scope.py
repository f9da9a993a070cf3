"""The scope in which a request runs: it ends when the client leaves or the server closes, and with it the generation."""

from __future__ import annotations

import asyncio
from types import TracebackType

from starlette.types import Receive

from jaxllm.server.errors import ClientDisconnected, NotReadyError
from jaxllm.server.state import Phase, ServerState


class RequestScope:
    """`async with RequestScope(state, receive):` cancels its body at once when the client disconnects or the server closes.

    The body must have read the request completely before. Leaving it raises ClientDisconnected or NotReadyError in these two cases;
    a cancellation from elsewhere passes through.
    """

    def __init__(self, state: ServerState, receive: Receive):
        self._state = state
        self._receive = receive
        self._disconnected = False

    async def __aenter__(self) -> RequestScope:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._state.open_tasks.add(task)
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._state.open_tasks.discard(self._task)
        self._watcher.cancel()
        if kind is None or not issubclass(kind, asyncio.CancelledError):
            return
        if self._disconnected:
            self._task.uncancel()
            raise ClientDisconnected from None
        if self._state.phase is Phase.CLOSING:
            self._task.uncancel()
            raise NotReadyError("the server is shutting down; the request was given up", retry_after_s=5) from None

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._disconnected = True
        self._task.cancel()
