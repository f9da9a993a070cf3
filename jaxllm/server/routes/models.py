"""GET /v1/models: the served model, by its names."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from jaxllm.server.openapi import documented
from jaxllm.server.responses import ModelCard, ModelList, json_response
from jaxllm.server.state import Serving, State

router = APIRouter(tags=["models"])


def _card(serving: Serving, name: str) -> ModelCard:
    return ModelCard(id=name, created=serving.created, root=serving.model_root, max_model_len=serving.engine.info.max_model_len)


@router.get("/v1/models", **documented(None, ModelList))
async def models(state: State) -> Response:
    """The names under which the model is served."""
    serving = state.serving
    return json_response(ModelList(data=[_card(serving, name) for name in serving.model_names]))


@router.get("/v1/models/{name:path}", **documented(None, ModelCard))
async def model(state: State, name: str) -> Response:
    """One of them."""
    serving = state.serving
    return json_response(_card(serving, serving.model_name(name)))
