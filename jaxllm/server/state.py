"""What the routes share: the engine once it serves, its names, and the requests that are open, each in a scope of its own."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import hashlib
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends
from starlette.requests import Request
from starlette.types import Receive

from jaxllm import __version__
from jaxllm.server.config import ServerConfig
from jaxllm.server.errors import ClientDisconnected, ModelNotFoundError, NotReadyError
from jaxllm.server.logprobs import token_texts
from jaxllm.server.output_formats import OutputFormats, settle_formats
from jaxllm.server.responses_api.store import ResponseStore
from jaxllm.server.tokenizing import Tokenizing
from jaxllm.server.tracing import RequestTracer

if TYPE_CHECKING:
    from jaxllm.async_llm import AsyncLLM


class Phase(enum.Enum):
    LOADING = "loading"
    READY = "ready"
    CLOSING = "closing"


class Serving:
    """A started engine and what the server derives from it once."""

    def __init__(self, engine: AsyncLLM, model_names: tuple[str, ...], model_root: str, formats: OutputFormats):
        self.engine = engine
        self.formats = formats
        self.model_names = model_names
        self.model_root = model_root
        self.created = int(time.time())
        self.token_texts = token_texts(engine.tokenizer)
        self.tokenizing = Tokenizing(engine.tokenizer, engine.info.max_prompt_len + 1)
        digest = hashlib.sha256(engine.config.to_json().encode()).hexdigest()[:8]
        self.fingerprint = f"jaxllm-{__version__}-{digest}"

    def model_name(self, asked: str | None) -> str:
        """The name to answer with. Raises ModelNotFoundError for a model that is not served."""
        if not asked:
            return self.model_names[0]
        if asked not in self.model_names:
            raise ModelNotFoundError(f"the model {asked!r:.200} does not exist here; served: {', '.join(self.model_names)}", param="model")
        return asked


class ServerState:
    """The life of the server: loading, ready, closing.

    Raises (on construction):
        ConfigError: spans are to be sent, and the packages for that are missing.
    """

    def __init__(self, config: ServerConfig):
        self.config = config
        self.tracer = None if config.otlp_traces_endpoint is None else RequestTracer(config.otlp_traces_endpoint)
        self.responses = ResponseStore(config.max_stored_responses, config.max_stored_responses_bytes)
        self.phase = Phase.LOADING
        self.open_tasks: set[asyncio.Task[None]] = set()
        self._serving: Serving | None = None

    def serve(self, engine: AsyncLLM) -> None:
        """Start to answer with `engine`. Raises ConfigError where its output cannot be parsed as configured."""
        names = self.config.served_model_name or (engine.model_name,)
        self._serving = Serving(engine, names, engine.model_name, settle_formats(self.config, engine.tokenizer))
        if self.phase is Phase.LOADING:
            self.phase = Phase.READY

    def close(self) -> None:
        """Take no new requests."""
        self.phase = Phase.CLOSING

    def cancel_open(self) -> None:
        """End what is still running: each request answers that the server is closing."""
        for task in list(self.open_tasks):
            task.cancel()

    @property
    def serving(self) -> Serving:
        """Raises NotReadyError before the engine serves and once the server closes."""
        if self.phase is Phase.CLOSING:
            raise NotReadyError("the server is shutting down", retry_after_s=5)
        return self.loaded

    @property
    def loaded(self) -> Serving:
        """The same also while the server closes. Raises NotReadyError before the engine serves."""
        if self._serving is None:
            raise NotReadyError("the model is still loading; GET /ready answers 200 once it serves", retry_after_s=2)
        return self._serving


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


async def _state_of(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


# A parameter of a route.
State = Annotated[ServerState, Depends(_state_of)]
