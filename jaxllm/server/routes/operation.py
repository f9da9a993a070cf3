"""Routes for those who run a server: SageMaker's entry, adapters, the tokenizer, profiles and the prefix cache."""

from __future__ import annotations

import os
from typing import Any

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from jaxllm.errors import InvalidRequestError
from jaxllm.server.body import decode_json
from jaxllm.server.responses import json_response
from jaxllm.server.routes.chat import chat_completions
from jaxllm.server.routes.completions import completions
from jaxllm.server.state import ServerState

router = APIRouter(tags=["operation"])
tokenizer_router = APIRouter(tags=["operation"])
dev_router = APIRouter(tags=["development"])

_CONFLICT = 409
_NOT_IMPLEMENTED = 501


@router.post("/invocations")
async def invocations(request: Request) -> Response:
    """What /v1/chat/completions answers to a body with messages, and /v1/completions to one with a prompt (SageMaker's convention)."""
    body = decode_json(await request.body())
    if isinstance(body, dict):
        if "messages" in body:
            return await chat_completions(request)
        if "prompt" in body:
            return await completions(request)
    raise InvalidRequestError("the body must be an object with messages (a chat) or prompt (a completion)")


@router.post("/v1/load_lora_adapter")
@router.post("/v1/unload_lora_adapter")
async def adapters(request: Request) -> Response:
    """Adapters do not exist yet."""
    raise HTTPException(_NOT_IMPLEMENTED, "LoRA adapters are not supported yet; merge the adapter into the model's weights and serve these")


@tokenizer_router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> Response:
    """What the served model's tokenizer is made of."""
    state: ServerState = request.app.state.server
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
async def reset_prefix_cache(request: Request) -> Response:
    """Forget all cached prefixes."""
    state: ServerState = request.app.state.server
    await state.serving.engine.reset_prefix_cache()
    return Response()


@dev_router.post("/start_profile")
async def start_profile(request: Request) -> Response:
    """Start to record a trace of the engine's process."""
    state: ServerState = request.app.state.server
    directory = os.path.abspath(state.config.profile_dir)
    if not await state.serving.engine.start_profile(directory):
        raise HTTPException(_CONFLICT, "a profile is being recorded already; POST /stop_profile ends it")
    return json_response({"profile_dir": directory})


@dev_router.post("/stop_profile")
async def stop_profile(request: Request) -> Response:
    """Write the trace that was started."""
    state: ServerState = request.app.state.server
    if not await state.serving.engine.stop_profile():
        raise HTTPException(_CONFLICT, "no profile is being recorded; POST /start_profile starts one")
    return json_response({"profile_dir": os.path.abspath(state.config.profile_dir)})
