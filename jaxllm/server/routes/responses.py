"""POST /v1/responses, and what can be done with stored responses."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from jaxllm.errors import InvalidRequestError, NotSupportedError
from jaxllm.server.answering import Answering, open_answering
from jaxllm.server.body import read_body
from jaxllm.server.conversation import Message, with_instructions
from jaxllm.server.generating import merged
from jaxllm.server.openapi import documented
from jaxllm.server.responses import json_response
from jaxllm.server.responses_api.items import messages_of
from jaxllm.server.responses_api.objects import DeletedResponse, ResponseObject
from jaxllm.server.responses_api.protocol import ResponsesRequest
from jaxllm.server.responses_api.store import ResponseStore, Running
from jaxllm.server.responses_api.translate import FIELD_NAMES, chat_request, check_logprobs, fitted
from jaxllm.server.responses_api.writer import ResponseWriter
from jaxllm.server.state import ServerState, State, request_scope
from jaxllm.server.streaming import EventStream

router = APIRouter(tags=["responses"])


@router.post("/v1/responses", **documented(ResponsesRequest, ResponseObject))
async def create_response(request: Request, state: State) -> Response:
    """Answer input in the Responses API."""
    store = state.responses
    body = await read_body(request, ResponsesRequest)
    keep = _is_kept(body, store)
    history = store.conversation(body.previous_response_id) if body.previous_response_id else []
    conversation = history + messages_of(body.input)
    if not conversation:
        raise InvalidRequestError("input holds nothing that a prompt could show: its reasoning is empty", param="input")
    chat = chat_request(body, with_instructions(body.instructions, conversation))
    if body.truncation == "auto":
        chat = await fitted(state, chat)
    answering = await open_answering(state, request, chat, prefix="resp", field_names=FIELD_NAMES)
    check_logprobs(body, parses=answering.plan.parses)
    # The client's own request id may come again: it would take the place of another response.
    answering.job.response_id = f"resp_{uuid.uuid4().hex}"
    writer = ResponseWriter(answering, _new_response(body, answering, keep=keep), events=bool(body.stream))
    run = _Run(answering, writer, store, conversation, keep=keep)
    if body.background:
        return run.in_background(state)
    if body.stream:
        return EventStream(state, run.frames(), failure=writer.fail, end=b"")
    async with request_scope(state, request.receive):
        async for _ in run.frames():
            pass
    return json_response(writer.response)


@router.get("/v1/responses/{response_id}", **documented(None, ResponseObject))
async def retrieve_response(request: Request, state: State, response_id: str) -> Response:
    """A stored response, as far as it is made."""
    if request.query_params.get("stream", "false").lower() not in ("false", "0", ""):
        raise NotSupportedError("stream=true is not offered for stored responses; poll them instead", param="stream")
    return Response(state.responses.response(response_id), media_type="application/json")


@router.post("/v1/responses/{response_id}/cancel", **documented(None, ResponseObject))
async def cancel_response(state: State, response_id: str) -> Response:
    """End a response that is made in the background; one that has ended already is given back as it is."""
    if not state.responses.is_background(response_id):
        raise InvalidRequestError(
            f"response {response_id!r} was not made with background=true; only such can be cancelled", param="response_id"
        )
    await state.responses.cancel(response_id)
    return Response(state.responses.response(response_id), media_type="application/json")


@router.delete("/v1/responses/{response_id}", **documented(None, DeletedResponse))
async def delete_response(state: State, response_id: str) -> Response:
    """Forget a stored response; one that is still being made is ended first."""
    await state.responses.cancel(response_id)
    state.responses.delete(response_id)
    return json_response(DeletedResponse(id=response_id))


class _Run:
    """One response on its way from the engine to the client and the store."""

    def __init__(self, answering: Answering, writer: ResponseWriter, store: ResponseStore, conversation: list[Message], *, keep: bool):
        self._answering = answering
        self._writer = writer
        self._store = store
        self._conversation = conversation
        self._keep = keep

    async def frames(self) -> AsyncGenerator[bytes, None]:
        opened = False
        async with contextlib.aclosing(merged(self._answering.job.start())) as outputs:
            async for _, output in outputs:
                frames = b"" if opened else self._writer.open()
                opened = True
                frames += self._writer.add(output)
                if self._writer.response.usage is not None and self._keep:
                    # Before the client hears of the end, since it may go on from here at once.
                    self._finish()
                yield frames

    def in_background(self, state: ServerState) -> Response:
        response = self._writer.response
        response.status = "queued"
        task = asyncio.create_task(self._drain())
        try:
            self._store.add_running(Running(response, task))
        except BaseException:
            task.cancel()
            raise
        state.open_tasks.add(task)
        task.add_done_callback(state.open_tasks.discard)
        task.add_done_callback(self._settle)
        return json_response(response)

    def _settle(self, _: asyncio.Task[None]) -> None:
        """A task that was cancelled before it began has settled nothing itself."""
        if self._store.running(self._writer.response.id) is not None:
            self._writer.cancel()
            self._finish()

    async def _drain(self) -> None:
        """Make the response without a client. It ends in the store, whatever happens."""
        try:
            self._writer.open()
            async for _ in self.frames():
                pass
        except asyncio.CancelledError:
            self._writer.cancel()
            self._finish()
        except Exception as error:
            self._writer.fail(error)
            self._finish()

    def _finish(self) -> None:
        response = self._writer.response
        answer = messages_of(msgspec.to_builtins(response.output)) if response.output else []
        self._store.finish(response, self._conversation + answer)


def _is_kept(body: ResponsesRequest, store: ResponseStore) -> bool:
    if not store.keeps and (body.store or body.background or body.previous_response_id):
        name = "store" if body.store else "background" if body.background else "previous_response_id"
        raise NotSupportedError(f"{name} needs stored responses, and this server keeps none (--max-stored-responses 0)", param=name)
    return store.keeps and body.store is not False


# Fields of a request that its response repeats.
_REPEATED = (
    *("instructions", "max_output_tokens", "max_tool_calls", "metadata", "parallel_tool_calls", "previous_response_id", "prompt_cache_key"),
    *("safety_identifier", "tools", "tool_choice", "top_logprobs", "truncation", "user"),
)


def _new_response(body: ResponsesRequest, answering: Answering, *, keep: bool) -> ResponseObject:
    job = answering.job
    more = {name: value for name in _REPEATED if (value := getattr(body, name)) is not None}
    return ResponseObject(
        id=job.response_id,
        created_at=job.created,
        model=job.model,
        background=bool(body.background),
        reasoning={"effort": None, "summary": None, **(body.reasoning or {})},
        store=keep,
        temperature=job.params.temperature,
        text={"format": {"type": "text"}, **{key: value for key, value in (body.text or {}).items() if value is not None}},
        top_p=job.params.top_p,
        **more,
    )
