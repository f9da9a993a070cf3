"""Listening, loading, serving and closing, in this order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

import uvicorn
import uvloop
from starlette.types import ASGIApp

from jaxllm.config import EngineConfig
from jaxllm.errors import ConfigError
from jaxllm.logging import configure_logging
from jaxllm.server.config import ServerConfig
from jaxllm.server.http import HttpProtocol
from jaxllm.server.state import ServerState

if TYPE_CHECKING:
    from jaxllm.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

T = TypeVar("T")

_BACKLOG = 2048
# Requests that were told to end need a moment to say so.
_LAST_WORDS_S = 2.0


def bind(config: ServerConfig) -> socket.socket:
    """A listening socket at the configured address.

    Raises:
        ConfigError: the address is taken, or is none of this machine's.
    """
    host, port, path = config.host or "0.0.0.0", config.port, config.uds
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise ConfigError(f"host={host!r} is no address of this machine: {error.strerror}") from None
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) if path else socket.socket(family, kind, protocol)
    try:
        if path:
            _remove_stale(path)
        else:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(path or address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        where, advice = (f"uds={path!r}", "") if path else (f"{host}:{port}", "; choose another --port (0: any free one) or --host")
        raise ConfigError(f"cannot listen on {where}: {(error.strerror or str(error)).lower()}{advice}") from None
    listener.setblocking(False)
    return listener


def _remove_stale(path: str) -> None:
    """Remove a socket that a server left behind; one that still answers, or another kind of file, stays."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise FileExistsError(17, "a file that is no socket lies there")
    except FileNotFoundError:
        return
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
        if probe.connect_ex(path) != 0:
            os.unlink(path)


def url_of(config: ServerConfig, listener: socket.socket) -> str:
    """The address for people of this machine."""
    scheme = "https" if config.ssl_certfile else "http"
    if config.uds:
        return f"{scheme}://localhost{config.root_path}"
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "localhost", "::": "localhost"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{scheme}://{host}:{port}{config.root_path}"


def serve_forever(state: ServerState, app: ASGIApp, listener: socket.socket, engine_config: EngineConfig) -> None:
    """Serve until a signal. Raises ConfigError for an unusable key or certificate, and what kept the engine from starting."""
    configure_logging(log_format=state.config.log_format)
    server = _Server(_uvicorn_config(state.config, app))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(state, server, listener, engine_config))


async def _serve(state: ServerState, server: _Server, listener: socket.socket, engine_config: EngineConfig) -> None:
    url = url_of(state.config, listener)
    with _signals() as stop:
        http = asyncio.create_task(server.serve(sockets=[listener]))
        loading = asyncio.create_task(_load(state, engine_config))
        stopping = asyncio.create_task(stop.first.wait())
        engine: AsyncLLM | None = None
        try:
            await asyncio.wait({http, loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                engine = loading.result()
                _announce(state, url)
                await asyncio.wait({http, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            state.close()
            stopping.cancel()
            await _close_http(state, server, http, stop.second)
            await _close_engine(engine, loading)
            if state.tracer is not None:
                await asyncio.to_thread(state.tracer.close)
            if state.config.uds:
                with contextlib.suppress(OSError):
                    os.unlink(state.config.uds)


async def _load(state: ServerState, engine_config: EngineConfig) -> AsyncLLM:
    """Start the engine while the HTTP server already answers that it is loading."""

    def build() -> AsyncLLM:
        from jaxllm.async_llm import AsyncLLM

        names = state.config.served_model_name
        return AsyncLLM(config=engine_config, metrics_prefix=state.config.metrics_prefix, served_model_name=names[0] if names else None)

    engine = await _in_daemon_thread(build)
    try:
        await engine.start()
        state.serve(engine)
    except BaseException:
        engine.shutdown()
        raise
    return engine


async def _in_daemon_thread(call: Callable[[], T]) -> T:
    """Run `call` in a thread that does not keep the process from ending, as a download in an executor's thread would."""
    future: Future[T] = Future()
    # Running, it cannot be cancelled: who waits may give up, and the thread still says how it ended.
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="load", daemon=True).start()
    return await asyncio.wrap_future(future)


def _announce(state: ServerState, url: str) -> None:
    model = state.serving.model_names[0]
    socket_option = f"--unix-socket {state.config.uds} " if state.config.uds else ""
    key = '-H "Authorization: Bearer $JAXLLM_API_KEY" ' if state.config.api_keys else ""
    # A question with one answer, and no chance in it: what comes back shows whether all is well.
    messages = '[{"role": "user", "content": "What is the capital of France?"}]'
    route, body = f"{url}/v1/chat/completions", f'{{"model": "{model}", "messages": {messages}, "temperature": 0}}'
    if (pooling := state.serving.engine.info.pooling) is not None:
        route, body = f"{url}/{'v1/embeddings' if 'embed' in pooling.tasks else 'pooling'}", f'{{"model": "{model}", "input": "Hello!"}}'
    elif state.serving.engine.tokenizer.chat_template is None:
        route, body = f"{url}/v1/completions", f'{{"model": "{model}", "prompt": "Once upon a time"}}'
    print(
        f"\nServing {model} at {url} (docs: {url}/docs). Try:\n\n"
        f"  curl {socket_option}{route} {key}-H 'Content-Type: application/json' \\\n    -d '{body}'\n",
        flush=True,
    )


# --------------------------------------------------------------------------------------------------------------- closing


async def _close_http(state: ServerState, server: _Server, http: asyncio.Task[None], hurry: asyncio.Event) -> None:
    """Stop accepting, let open requests finish within the grace period (or until a second signal), then end them."""
    server.should_exit = True
    grace = asyncio.create_task(_wait_for_requests(state))
    hurrying = asyncio.create_task(hurry.wait())
    await asyncio.wait({grace, hurrying, http}, timeout=state.config.shutdown_timeout, return_when=asyncio.FIRST_COMPLETED)
    if state.open_tasks:
        logger.warning("giving up %d open requests", len(state.open_tasks))
        state.cancel_open()
    await asyncio.wait({http}, timeout=_LAST_WORDS_S)
    # Who still sends a body, or reads none of the answer, is left.
    for connection in list(server.server_state.connections):
        connection.transport.abort()
    for task in (grace, hurrying):
        task.cancel()
    await asyncio.wait({http}, timeout=_LAST_WORDS_S)
    http.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await http


async def _wait_for_requests(state: ServerState) -> None:
    while state.open_tasks:
        await asyncio.wait(set(state.open_tasks), timeout=0.1)


async def _close_engine(engine: AsyncLLM | None, loading: asyncio.Task[AsyncLLM]) -> None:
    if not loading.done():
        loading.cancel()
        # A cancelled load shuts down what it started.
        await asyncio.wait({loading})
    if engine is not None:
        await asyncio.to_thread(engine.shutdown)


class _Stop:
    """Set by signals: `first` by the first one, `second` by one that comes while the server is closing."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    def __call__(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


@contextlib.contextmanager
def _signals() -> Iterator[_Stop]:
    stop = _Stop()
    loop = asyncio.get_running_loop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        yield stop
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
            # The process ends now, in order: another signal on its last steps must not make that a death by signal.
            signal.signal(number, signal.SIG_IGN)


# --------------------------------------------------------------------------------------------------------------- uvicorn


class _Server(uvicorn.Server):
    """uvicorn without signal handlers of its own: it would end the process by the signal, with work left to do."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _uvicorn_config(config: ServerConfig, app: ASGIApp) -> uvicorn.Config:
    made = uvicorn.Config(
        app,
        http=HttpProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level=config.uvicorn_log_level,
        access_log=not config.disable_uvicorn_access_log,
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        ssl_ca_certs=config.ssl_ca_certs,
        ssl_cert_reqs=config.ssl_cert_reqs,
        ssl_ciphers=config.ssl_ciphers or "DEFAULT",
        server_header=False,
    )
    try:
        made.load()
    except OSError as error:
        raise ConfigError(
            f"ssl_certfile={config.ssl_certfile!r} and ssl_keyfile={config.ssl_keyfile!r} cannot be used together as PEM files, with "
            f"ssl_ca_certs={config.ssl_ca_certs!r} and ssl_ciphers={config.ssl_ciphers!r}: {error}"
        ) from None
    return made
