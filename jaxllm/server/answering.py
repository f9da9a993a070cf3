"""One conversation being answered: what every endpoint that answers one shares, whatever its request and response look like."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from jaxllm.errors import InvalidRequestError
from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.server.answers import AnswerPlan, AnswerReader
from jaxllm.server.generating import Job, UsageCounter, new_job
from jaxllm.server.parsers import ContentDelta, Event
from jaxllm.server.prompts import chat_prompt
from jaxllm.server.protocol import ChatCompletionRequest
from jaxllm.server.responses import Usage
from jaxllm.server.sampling import chat_params
from jaxllm.server.state import ServerState
from jaxllm.server.structured import constraint_field, with_reasoning


class Answering:
    """The engine's job for a conversation, and the parts of its answers: text, reasoning and tool calls."""

    def __init__(self, job: Job, body: ChatCompletionRequest, plan: AnswerPlan):
        self.job = job
        self.body = body
        self.plan = plan
        self._readers: dict[int, AnswerReader] = {}
        self._counter = UsageCounter(job)

    def count(self, output: RequestOutput) -> None:
        """Count the tokens of an output, once."""
        self._counter.add(0, output)

    def read(self, choice: CompletionOutput) -> list[Event]:
        """The parts that an output of a choice makes certain."""
        if not self.plan.parses:
            return [ContentDelta(choice.text)] if choice.text else []
        return self._reader(choice).read(choice)

    def finish_reason(self, choice: CompletionOutput) -> str | None:
        """Why a choice ended, once everything of it was read; None before."""
        return self._reader(choice).finish_reason(choice) if self.plan.parses else choice.finish_reason

    def usage(self) -> Usage:
        """Tokens of the prompt, and of what was counted so far."""
        if self.plan.reasoning is not None:
            self._counter.reasoning_tokens = sum(reader.reasoning_tokens for reader in self._readers.values())
        return self._counter.usage()

    def _reader(self, choice: CompletionOutput) -> AnswerReader:
        reader = self._readers.get(choice.index)
        if reader is None:
            job = self.job
            reader = self._readers[choice.index] = self.plan.reader(job.prompts[0], skips_special_tokens=job.params.skip_special_tokens)
        return reader


async def open_answering(
    state: ServerState,
    request: Request,
    body: ChatCompletionRequest,
    *,
    prefix: str,
    field_names: Mapping[str, str] | None = None,
) -> Answering:
    """Render a conversation and make a job of it; nothing runs yet.

    Args:
        prefix: what the response's id begins with.
        field_names: fields of the endpoint's own request by the names that errors know: those of chat and of sampling parameters.

    Raises:
        InvalidRequestError: the model, a field, or the conversation cannot be served.
    """
    serving = state.serving
    constraint = constraint_field(body)
    constraint = (field_names or {}).get(constraint, constraint)
    names = {"logprobs": "top_logprobs", "structured_outputs": constraint, **(field_names or {})}
    try:
        # Schemas may be large; those of few tools are read in less time than a hop to another thread is worth.
        is_long = body.response_format is not None or len(body.tools or ()) > 64
        plan = await asyncio.to_thread(AnswerPlan, state, body) if is_long else AnswerPlan(state, body)
        defaults = serving.engine.default_sampling_params
        params = chat_params(body, defaults, plan.constraint, keep_special_tokens=plan.keeps_special_tokens)
        prompt = await chat_prompt(state, body)
        params = with_reasoning(params, plan, prompt.text, continues=bool(body.continue_final_message))
    except InvalidRequestError as error:
        raise error.renamed(names) from error
    job = new_job(state, request, body, prefix=prefix, prompts=[prompt], params=params, field_names=names)
    return Answering(job, body, plan)


def translated(fields: Mapping[str, Any], field_names: Mapping[str, str]) -> ChatCompletionRequest:
    """The chat request that another API's request comes to.

    Raises:
        InvalidRequestError, pydantic.ValidationError: a field is at fault; the message has the name that it has there.
    """
    chat = ChatCompletionRequest.model_validate(fields)
    try:
        chat.check()
    except InvalidRequestError as error:
        raise error.renamed(field_names) from error
    return chat
