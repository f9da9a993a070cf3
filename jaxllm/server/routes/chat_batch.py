"""POST /v1/chat/completions/batch: several conversations in one request, answered together."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from jaxllm.server.answering import open_answering
from jaxllm.server.body import read_body
from jaxllm.server.generating import final_outputs
from jaxllm.server.openapi import documented
from jaxllm.server.prompts import MAX_PROMPTS
from jaxllm.server.protocol import ApiRequest, ChatCompletionRequest
from jaxllm.server.responses import ChatCompletion, CompletionTokensDetails, PromptTokensDetails, Usage, json_response
from jaxllm.server.routes.chat import ChatWriter
from jaxllm.server.scope import request_scope
from jaxllm.server.state import State

router = APIRouter(tags=["generation"])


class ChatBatchRequest(ApiRequest):
    """Body of POST /v1/chat/completions/batch. The other fields are those of chat completions, the same for every conversation."""

    messages: list[list[dict[str, Any]]] = Field(
        min_length=1, max_length=MAX_PROMPTS, description=f"At most {MAX_PROMPTS} conversations; choice i answers conversation i"
    )
    n: Literal[1] | None = Field(None, description="Repeat a conversation for more")
    stream: Literal[False] | None = Field(None, description="Stream from /v1/chat/completions")

    def conversations(self) -> list[ChatCompletionRequest]:
        """Raises InvalidRequestError, pydantic.ValidationError where a field is at fault."""
        found = []
        for messages in self.messages:
            chat = ChatCompletionRequest.model_validate({**(self.model_extra or {}), "model": self.model, "messages": messages})
            chat.check()
            found.append(chat)
        return found


@router.post("/v1/chat/completions/batch", **documented(ChatBatchRequest, ChatCompletion))
async def chat_completions_batch(request: Request, state: State) -> Response:
    """Answer several conversations; the first failure ends the others."""
    body = await read_body(request, ChatBatchRequest)
    opened = [await open_answering(state, request, chat, prefix="chatcmpl") for chat in body.conversations()]
    async with request_scope(state, request.receive):
        outputs = await final_outputs([stream for answering in opened for stream in answering.job.start()])
    answers = [ChatWriter(answering).whole(output) for answering, output in zip(opened, outputs, strict=True)]
    whole = answers[0]
    for index, answer in enumerate(answers):
        answer.choices[0].index = index
    whole.choices = [answer.choices[0] for answer in answers]
    whole.usage = _sum([answer.usage for answer in answers])
    return json_response(whole)


def _sum(parts: list[Usage]) -> Usage:
    total = Usage(*(sum(getattr(part, name) for part in parts) for name in ("prompt_tokens", "completion_tokens", "total_tokens")))
    total.prompt_tokens_details = PromptTokensDetails(sum(part.prompt_tokens_details.cached_tokens for part in parts))
    total.completion_tokens_details = CompletionTokensDetails(sum(part.completion_tokens_details.reasoning_tokens for part in parts))
    return total
