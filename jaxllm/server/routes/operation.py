"""Routes for those who run a server: its health and metrics, SageMaker's entry, adapters, the tokenizer, profiles, the prefix cache."""

from __future__ import annotations

import os
from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from jaxllm import __version__
from jaxllm.errors import InvalidRequestError
from jaxllm.server.body import read_json
from jaxllm.server.responses import json_response
from jaxllm.server.routes.chat import chat_completions
from jaxllm.server.routes.completions import completions
from jaxllm.server.routes.pooling import classify, embeddings, pooling, rerank, score
from jaxllm.server.state import State

router = APIRouter(tags=["operation"])
tokenizer_router = APIRouter(tags=["operation"])
dev_router = APIRouter(tags=["development"])

_CONFLICT = 409
_NOT_IMPLEMENTED = 501


@router.head("/health", include_in_schema=False)
@router.get("/health")
@router.get("/ping")
@router.post("/ping")
async def health(state: State) -> Response:
    """200 while the engine lives and serves; 503 before and after."""
    await state.loaded.engine.check_health()
    return Response()


@router.head("/ready", include_in_schema=False)
@router.get("/ready")
async def ready(state: State) -> Response:
    """200 while new requests are taken: not while the model loads, nor once the server is told to stop."""
    await state.serving.engine.check_health()
    return Response()


@router.get("/load")
async def load(state: State) -> Response:
    """The number of generation requests that are open."""
    return json_response({"server_load": len(state.open_tasks)})


@router.get("/version")
async def version() -> Response:
    return json_response({"version": __version__})


@router.get("/metrics")
async def metrics(state: State) -> Response:
    """Metrics in the text format of Prometheus."""
    return Response(generate_latest(state.loaded.engine.metrics.registry), media_type=CONTENT_TYPE_LATEST)


@router.post("/invocations")
async def invocations(request: Request, state: State) -> Response:
    """What the endpoint answers whose body this is, as its fields tell and the model can (SageMaker's convention)."""
    body = await read_json(request)
    info = state.serving.engine.info.pooling
    routes = {"messages": chat_completions, "prompt": completions}
    if info is not None:
        vectors = embeddings if "embed" in info.tasks else classify if "classify" in info.tasks else pooling
        routes = {"query": rerank, "text_1": score, "data_1": score, "queries": score, "input": vectors, "messages": vectors}
    for name, route in routes.items():
        if isinstance(body, dict) and name in body:
            return await route(request, state)
    raise InvalidRequestError(f"the body must be an object with one of {', '.join(routes)}")


@router.post("/v1/load_lora_adapter")
@router.post("/v1/unload_lora_adapter")
async def adapters(request: Request) -> Response:
    """Adapters do not exist yet."""
    raise HTTPException(_NOT_IMPLEMENTED, "LoRA adapters are not supported yet; merge the adapter into the model's weights and serve these")


@tokenizer_router.get("/tokenizer_info")
async def tokenizer_info(state: State) -> Response:
    """What the served model's tokenizer is made of."""
    serving = state.serving
    tokenizer = serving.engine.tokenizer
    special = set(tokenizer.all_special_ids)
    info: dict[str, Any] = {
        "tokenizer_class": type(tokenizer.backend.model).__name__,
        "vocab_size": tokenizer.vocab_size,
        "model_max_length": serving.engine.info.max_model_len,
        "chat_template": tokenizer.chat_template,
        **tokenizer.special_tokens,
        "added_tokens_decoder": {
            str(token_id): {"content": text, "special": token_id in special} for token_id, text in tokenizer.added_tokens.items()
        },
    }
    return json_response(info)


@dev_router.post("/reset_prefix_cache")
async def reset_prefix_cache(state: State) -> Response:
    """Forget all cached prefixes."""
    await state.serving.engine.reset_prefix_cache()
    return Response()


@dev_router.post("/start_profile")
async def start_profile(state: State) -> Response:
    """Start to record a trace of the engine's process."""
    directory = os.path.abspath(state.config.profile_dir)
    if not await state.serving.engine.start_profile(directory):
        raise HTTPException(_CONFLICT, "a profile is being recorded already; POST /stop_profile ends it")
    return json_response({"profile_dir": directory})


@dev_router.post("/stop_profile")
async def stop_profile(state: State) -> Response:
    """Write the trace that was started."""
    if not await state.serving.engine.stop_profile():
        raise HTTPException(_CONFLICT, "no profile is being recorded; POST /start_profile starts one")
    return json_response({"profile_dir": os.path.abspath(state.config.profile_dir)})
