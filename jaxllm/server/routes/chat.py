"""POST /v1/chat/completions, and /v1/chat/completions/batch: several conversations in one request, answered together."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Literal

import msgspec
from fastapi import APIRouter
from msgspec import UNSET
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.server.answering import Answering, open_answering
from jaxllm.server.body import read_body
from jaxllm.server.generating import final_outputs, merged
from jaxllm.server.logprobs import LogprobFormat, prompt_logprobs
from jaxllm.server.openapi import documented
from jaxllm.server.parsers import ContentDelta, Event, ReasoningDelta, ToolCallStart
from jaxllm.server.prompts import MAX_PROMPTS
from jaxllm.server.protocol import ApiRequest, ChatCompletionRequest, Objects
from jaxllm.server.responses import (
    ChatChoice,
    ChatCompletion,
    ChatMessage,
    CompletionTokensDetails,
    FunctionCall,
    PromptTokensDetails,
    ToolCall,
    Usage,
    json_response,
)
from jaxllm.server.state import State, request_scope
from jaxllm.server.streaming import ChunkHead, EventStream, UsageMode, chat_chunk, finish_members, member
from jaxllm.text.chat_messages import join_parts, plain_messages

router = APIRouter(tags=["generation"])

_encode = msgspec.json.Encoder().encode


@router.post("/v1/chat/completions", **documented(ChatCompletionRequest, ChatCompletion))
async def chat_completions(request: Request, state: State) -> Response:
    """Answer a conversation."""
    body = await read_body(request, ChatCompletionRequest)
    answering = await open_answering(state, request, body, prefix="chatcmpl")
    writer = ChatWriter(answering)
    if body.stream:
        return EventStream(state, writer.stream(UsageMode(state, body)))
    async with request_scope(state, request.receive):
        (output,) = await final_outputs(answering.job.start())
    return json_response(writer.whole(output))


class ChatBatchRequest(ApiRequest):
    """Body of POST /v1/chat/completions/batch. The other fields are those of chat completions, the same for every conversation."""

    messages: list[Objects] = Field(
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
        choice = answer.choices[0]
        choice.index, choice.prompt_token_ids, choice.prompt_logprobs = index, answer.prompt_token_ids, answer.prompt_logprobs
    whole.choices = [answer.choices[0] for answer in answers]
    whole.prompt_token_ids = whole.prompt_logprobs = UNSET
    whole.usage = _sum([answer.usage for answer in answers])
    return json_response(whole)


def _sum(parts: list[Usage]) -> Usage:
    total = Usage(*(sum(getattr(part, name) for part in parts) for name in ("prompt_tokens", "completion_tokens", "total_tokens")))
    total.prompt_tokens_details = PromptTokensDetails(sum(part.prompt_tokens_details.cached_tokens for part in parts))
    total.completion_tokens_details = CompletionTokensDetails(sum(part.completion_tokens_details.reasoning_tokens for part in parts))
    return total


class ChatWriter:
    """Turns the engine's outputs into the response of one request."""

    def __init__(self, answering: Answering):
        self._answering = answering
        self._job = job = answering.job
        self._body = body = answering.body
        self._plan = answering.plan
        top = -1 if body.logprob_token_ids is not None else body.top_logprobs or 0
        self._form = LogprobFormat(job.serving.token_texts, top=top, as_token_ids=bool(body.return_tokens_as_token_ids))
        generates_answer = not body.continue_final_message and body.add_generation_prompt is not False
        last = body.messages[-1]
        self._role: str = "assistant" if generates_answer else last["role"]
        is_echoed = body.echo and last["role"] == self._role
        self._echoed = join_parts(plain_messages([last])[0].get("content", "")) if is_echoed else ""

    # ------------------------------------------------------------------------------------------------------ not streamed

    def whole(self, output: RequestOutput) -> ChatCompletion:
        job, body = self._job, self._body
        self._answering.count(output)
        result = ChatCompletion(
            id=job.response_id,
            created=job.created,
            model=job.model,
            system_fingerprint=job.serving.fingerprint,
            choices=[self._choice(choice) for choice in sorted(output.outputs, key=lambda choice: choice.index)],
            usage=self._answering.usage(),
        )
        if body.prompt_logprobs is not None:
            result.prompt_logprobs = prompt_logprobs(output.prompt_logprobs, self._form)
        if body.return_token_ids:
            result.prompt_token_ids = job.prompts[0].token_ids
        return result

    def _choice(self, choice: CompletionOutput) -> ChatChoice:
        message = self._message(self._answering.read(choice))
        result = ChatChoice(
            index=choice.index,
            message=message,
            logprobs=self._form.chat(choice.token_ids, choice.logprobs or []) if self._body.logprobs else None,
            finish_reason=self._finish_reason(choice),
            stop_reason=choice.stop_reason,
        )
        if self._body.return_token_ids:
            result.token_ids = choice.token_ids
        return result

    def _finish_reason(self, choice: CompletionOutput) -> str | None:
        reason = self._answering.finish_reason(choice)
        # As OpenAI has it: the client who named the function knows that it is a call.
        return "stop" if reason == "tool_calls" and self._plan.choice.named else reason

    def _message(self, events: list[Event]) -> ChatMessage:
        content, reasoning = self._echoed, ""
        calls: list[ToolCall] = []
        for event in events:
            if isinstance(event, ContentDelta):
                content += event.text
            elif isinstance(event, ReasoningDelta):
                reasoning += event.text
            elif isinstance(event, ToolCallStart):
                calls.append(ToolCall(id=event.id or "", function=FunctionCall(event.name, "")))
            else:
                calls[event.index].function.arguments += event.text
        message = ChatMessage(role=self._role, content=content or (None if calls or reasoning else ""))
        if self._plan.reasoning is not None:
            message.reasoning = reasoning or None
            if self._plan.repeats_reasoning:
                message.reasoning_content = message.reasoning
        if calls:
            message.tool_calls = calls
        return message

    # ---------------------------------------------------------------------------------------------------------- streamed

    async def stream(self, usage: UsageMode) -> AsyncGenerator[bytes, None]:
        """Frames, one write for each output of the engine: the role first, then text, then each choice's end."""
        job = self._job
        head = ChunkHead(
            id=job.response_id,
            object="chat.completion.chunk",
            created=job.created,
            model=job.model,
            system_fingerprint=job.serving.fingerprint,
        )
        opened = False
        async for _, output in merged(job.start()):
            self._answering.count(output)
            deltas = [self._deltas(choice) for choice in output.outputs]
            tail = usage.tail(self._answering.usage() if usage.continuous else None)
            frames = []
            if not opened:
                opened = True
                frames += self._opening(head, tail)
            for choice, parts in zip(output.outputs, deltas, strict=True):
                frames += self._frames(head, choice, parts, tail)
            if frames:
                yield b"".join(frames)
        if usage.include:
            yield head.usage(self._answering.usage())

    def _opening(self, head: ChunkHead, tail: bytes) -> list[bytes]:
        extra = member("prompt_token_ids", self._job.prompts[0].token_ids) if self._body.return_token_ids else b""
        frames = []
        for index in range(self._job.params.n):
            frames.append(chat_chunk(head, index, _encode({"role": self._role, "content": ""}), tail, extra=extra))
            if self._echoed:
                frames.append(chat_chunk(head, index, _encode({"content": self._echoed}), tail))
        return frames

    def _deltas(self, choice: CompletionOutput) -> list[bytes]:
        """JSON of the deltas that an output of a choice makes."""
        return [self._delta(event) for event in self._answering.read(choice)]

    def _delta(self, event: Event) -> bytes:
        if isinstance(event, ContentDelta):
            return _content(event.text)
        if isinstance(event, ReasoningDelta):
            text = _encode(event.text)
            return b'{"reasoning":' + text + (b',"reasoning_content":' + text if self._plan.repeats_reasoning else b"") + b"}"
        if isinstance(event, ToolCallStart):
            call = {"index": event.index, "id": event.id, "type": "function", "function": {"name": event.name, "arguments": ""}}
            return _encode({"tool_calls": [call]})
        return b'{"tool_calls":[{"index":%d,"function":{"arguments":%b}}]}' % (event.index, _encode(event.text))

    def _frames(self, head: ChunkHead, choice: CompletionOutput, deltas: list[bytes], tail: bytes) -> list[bytes]:
        logprobs = _encode(self._form.chat(choice.token_ids, choice.logprobs)) if self._body.logprobs and choice.logprobs else b"null"
        extra = member("token_ids", choice.token_ids) if self._body.return_token_ids and choice.token_ids else b""
        if not deltas and (logprobs != b"null" or extra):
            deltas = [_content("")]
        frames = []
        for delta in deltas:
            frames.append(chat_chunk(head, choice.index, delta, tail, logprobs=logprobs, extra=extra))
            # What an output says of its tokens is said once.
            logprobs, extra = b"null", b""
        if choice.finish_reason is not None:
            finish, stop = finish_members(choice, self._finish_reason(choice))
            frames.append(chat_chunk(head, choice.index, b"{}", tail, finish=finish, extra=stop))
        return frames


def _content(text: str) -> bytes:
    return b'{"content":' + _encode(text) + b"}"
