"""Whether the server is alive, whether it serves, how busy it is, and its metrics."""

from __future__ import annotations

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from jaxllm import __version__
from jaxllm.server.responses import json_response
from jaxllm.server.state import ServerState

router = APIRouter(tags=["operation"])


@router.get("/health")
@router.get("/ping")
@router.post("/ping")
async def health(request: Request) -> Response:
    """200 while the engine lives and serves; 503 before and after."""
    state: ServerState = request.app.state.server
    await state.loaded.engine.check_health()
    return Response()


@router.get("/ready")
async def ready(request: Request) -> Response:
    """200 while new requests are taken: not while the model loads, nor once the server is told to stop."""
    state: ServerState = request.app.state.server
    await state.serving.engine.check_health()
    return Response()


@router.get("/load")
async def load(request: Request) -> Response:
    """The number of generation requests that are open."""
    state: ServerState = request.app.state.server
    return json_response({"server_load": len(state.open_tasks)})


@router.get("/version")
async def version() -> Response:
    return json_response({"version": __version__})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Metrics in the text format of Prometheus."""
    state: ServerState = request.app.state.server
    return Response(generate_latest(state.loaded.engine.metrics.registry), media_type=CONTENT_TYPE_LATEST)
