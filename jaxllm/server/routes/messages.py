"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from jaxllm.server.answering import Answering, open_answering
from jaxllm.server.body import read_body
from jaxllm.server.generating import merged
from jaxllm.server.messages_api.objects import MessageObject, TokenCount
from jaxllm.server.messages_api.protocol import CountTokensRequest, MessagesRequest
from jaxllm.server.messages_api.translate import FIELD_NAMES, chat_request
from jaxllm.server.messages_api.writer import MessageWriter
from jaxllm.server.openapi import documented
from jaxllm.server.prompts import render_chat
from jaxllm.server.responses import json_response
from jaxllm.server.state import State, request_scope
from jaxllm.server.streaming import EventStream

router = APIRouter(tags=["messages"])


@router.post("/v1/messages", **documented(MessagesRequest, MessageObject))
async def create_message(request: Request, state: State) -> Response:
    """Answer a conversation in the Messages API."""
    body = await read_body(request, MessagesRequest)
    chat = chat_request(body)
    if body.thinking is not None and state.serving.formats.reasoning is None:
        # Clients send a budget whatever the model is: where no reasoning is read there is none to end.
        chat.thinking_token_budget = None
    answering = await open_answering(state, request, chat, prefix="msg", field_names=FIELD_NAMES)
    writer = MessageWriter(answering, events=bool(body.stream))
    if body.stream:
        return EventStream(state, _frames(answering, writer), failure=writer.fail, end=b"")
    async with request_scope(state, request.receive):
        async for _ in _frames(answering, writer):
            pass
    return json_response(writer.message)


@router.post("/v1/messages/count_tokens", **documented(CountTokensRequest, TokenCount))
async def count_tokens(request: Request, state: State) -> Response:
    """How many tokens a conversation has, with its system prompt and tools; also beyond the context."""
    serving = state.serving
    body = await read_body(request, CountTokensRequest)
    chat = chat_request(body)
    text = await render_chat(state, chat.messages, chat)
    ids = await serving.tokenizing.encode(text, add_special_tokens=False, truncated=True)
    return json_response(TokenCount(len(ids)))


async def _frames(answering: Answering, writer: MessageWriter) -> AsyncGenerator[bytes, None]:
    async with aclosing(merged(answering.job.start())) as outputs:
        async for _, output in outputs:
            yield writer.add(output)
