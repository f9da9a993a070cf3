"""POST /tokenize and /detokenize: the tokens of the served model."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from jaxllm.engine.input_processor import check_in_vocabulary
from jaxllm.server.body import read_body
from jaxllm.server.openapi import documented
from jaxllm.server.prompts import render_chat
from jaxllm.server.protocol import DetokenizeRequest, TokenizeRequest
from jaxllm.server.responses import Detokenized, Tokenized, json_response
from jaxllm.server.state import State

router = APIRouter(tags=["tokens"])


@router.post("/tokenize", **documented(TokenizeRequest, Tokenized))
async def tokenize(request: Request, state: State) -> Response:
    """Token ids of a prompt, or of a conversation as the chat template renders it."""
    serving = state.serving
    body = await read_body(request, TokenizeRequest)
    special = body.add_special_tokens
    if body.messages is not None:
        text = await render_chat(state, body.messages, body)
        special = bool(special)
    else:
        text = body.prompt or ""
        special = special is not False
    # Counting tokens is allowed beyond the context.
    ids = await serving.tokenizing.encode(text, add_special_tokens=special, truncated=True)
    name_of = serving.engine.tokenizer.id_to_token
    names = await asyncio.to_thread(lambda: [name_of(token) or "" for token in ids]) if body.return_token_strs else None
    return json_response(Tokenized(count=len(ids), max_model_len=serving.engine.info.max_model_len, tokens=ids, token_strs=names))


@router.post("/detokenize", **documented(DetokenizeRequest, Detokenized))
async def detokenize(request: Request, state: State) -> Response:
    """Text of token ids, special tokens included."""
    serving = state.serving
    body = await read_body(request, DetokenizeRequest)
    if body.tokens:
        check_in_vocabulary("tokens", body.tokens, serving.engine.info.vocab_size)
    return json_response(Detokenized(serving.engine.tokenizer.decode(body.tokens, skip_special_tokens=False)))
