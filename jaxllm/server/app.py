"""The application: routes, middleware and error handlers around a `ServerState`; and the command that runs it."""

from __future__ import annotations

import inspect
import pkgutil

from fastapi import Depends, FastAPI
from starlette.middleware.cors import CORSMiddleware

from jaxllm import __version__
from jaxllm.config import EngineConfig
from jaxllm.errors import ConfigError
from jaxllm.server.config import ServerConfig
from jaxllm.server.errors import NotFoundError, install_error_handlers
from jaxllm.server.lifecycle import bind, serve_forever
from jaxllm.server.middleware import ApiKeyMiddleware, BodyLimitMiddleware, RequestIdMiddleware
from jaxllm.server.openapi import install_openapi
from jaxllm.server.routes import chat, completions, generate, messages, models, operation, pooling, responses, tokenize
from jaxllm.server.state import ServerState, State


def create_app(state: ServerState) -> FastAPI:
    """The ASGI application that answers for `state`, whatever phase it is in."""
    config = state.config
    docs = not config.disable_fastapi_docs
    app = FastAPI(
        title="jaxllm",
        version=__version__,
        description="OpenAI-compatible API of a jaxllm server",
        docs_url="/docs" if docs else None,
        redoc_url="/redoc" if docs else None,
        openapi_url="/openapi.json" if docs else None,
    )
    # Some proxies strip the prefix, others do not: routes are found with and without it.
    app.root_path = config.root_path
    app.state.server = state
    for routes in (completions, chat, responses, messages, generate):
        app.include_router(routes.router, dependencies=[Depends(_check_generates)])
    for router in (pooling.router, models.router, tokenize.router, operation.router):
        app.include_router(router)
    if config.enable_tokenizer_info_endpoint:
        app.include_router(operation.tokenizer_router)
    if config.enable_dev_endpoints:
        app.include_router(operation.dev_router)
    install_error_handlers(app)
    install_openapi(app)
    # The last one added is the first to see a request. CORS is outermost: browsers must be able to read refusals.
    app.add_middleware(BodyLimitMiddleware, limit=config.max_request_body_size)
    if config.api_keys:
        app.add_middleware(ApiKeyMiddleware, keys=config.api_keys, root_path=config.root_path)
    if config.enable_request_id_headers:
        app.add_middleware(RequestIdMiddleware)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=config.allowed_origins,
        allow_methods=config.allowed_methods,
        allow_headers=config.allowed_headers,
        allow_credentials=config.allow_credentials,
    )
    for path in config.middleware:
        _add_middleware(app, path)
    return app


def _add_middleware(app: FastAPI, path: str) -> None:
    """Raises ConfigError where the path leads to no middleware."""
    try:
        found = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"middleware={path!r} cannot be imported: {error}") from None
    if inspect.isclass(found):
        app.add_middleware(found)  # type: ignore[arg-type]
    elif inspect.iscoroutinefunction(found):
        app.middleware("http")(found)
    else:
        raise ConfigError(f"middleware={path!r} is neither a class nor an async function")


async def _check_generates(state: State) -> None:
    """Before every route that generates. Raises NotFoundError where the model does not."""
    if state.serving.engine.info.pooling is not None:
        raise NotFoundError(
            "this model answers with vectors and generates nothing; ask /v1/embeddings, /pooling, /classify, /score or /rerank"
        )


def run_server(engine_config: EngineConfig, server_config: ServerConfig) -> None:
    """Load a model and serve it until SIGTERM or SIGINT; returns once everything is closed.

    The address is taken first, so that a port in use is reported before a model is loaded.

    Raises:
        ConfigError: the address cannot be listened on, or an option cannot be honoured.
        JaxllmError: the model cannot be loaded.
    """
    listener = bind(server_config)
    state = ServerState(server_config)
    serve_forever(state, create_app(state), listener, engine_config)
