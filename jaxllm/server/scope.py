"""The scope in which a request runs: it ends when the client leaves or the server closes, and with it the generation."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.types import Receive

from jaxllm.server.errors import ClientDisconnected, NotReadyError
from jaxllm.server.state import Phase, ServerState


@contextlib.asynccontextmanager
async def request_scope(state: ServerState, receive: Receive) -> AsyncIterator[None]:
    """Cancels its body at once when the client disconnects or the server closes.

    The body must have read the request completely before. In these two cases ClientDisconnected or NotReadyError is raised; a
    cancellation from elsewhere passes through.
    """
    task = asyncio.current_task()
    assert task is not None
    disconnected = False

    async def watch() -> None:
        nonlocal disconnected
        while (await receive())["type"] != "http.disconnect":
            pass
        disconnected = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    state.open_tasks.add(task)
    try:
        yield
    except asyncio.CancelledError:
        if disconnected:
            task.uncancel()
            raise ClientDisconnected from None
        if state.phase is Phase.CLOSING:
            task.uncancel()
            raise NotReadyError("the server is shutting down; the request was given up", retry_after_s=5) from None
        raise
    finally:
        state.open_tasks.discard(task)
        watcher.cancel()
