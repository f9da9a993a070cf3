"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.server.body import read_body
from jaxllm.server.generating import Job, Prompt, UsageCounter, final_outputs, merged, new_job
from jaxllm.server.logprobs import CompletionLogprobsBuilder, LogprobFormat, prompt_logprobs
from jaxllm.server.openapi import documented
from jaxllm.server.prompts import completion_prompts
from jaxllm.server.protocol import CompletionRequest
from jaxllm.server.responses import Completion, CompletionChoice, CompletionLogprobs, json_response
from jaxllm.server.sampling import completion_params
from jaxllm.server.state import State, request_scope
from jaxllm.server.streaming import ChunkHead, EventStream, UsageMode, completion_chunk, finish_members, member
from jaxllm.server.structured import constraint_field

router = APIRouter(tags=["generation"])


@router.post("/v1/completions", **documented(CompletionRequest, Completion))
async def completions(request: Request, state: State) -> Response:
    """Complete one or several prompts."""
    serving = state.serving
    body = await read_body(request, CompletionRequest)
    params = completion_params(body, serving.engine.default_sampling_params)
    prompts = await completion_prompts(serving, body, params)
    names = {"structured_outputs": constraint_field(body)}
    job = new_job(state, request, body, prefix="cmpl", prompts=prompts, params=params, field_names=names)
    writer = _Writer(job, body)
    if body.stream:
        return EventStream(state, writer.stream(UsageMode(state, body)))
    async with request_scope(state, request.receive):
        outputs = await final_outputs(job.start())
    return json_response(writer.whole(outputs))


class _Writer:
    """Turns the engine's outputs into the response of one request."""

    def __init__(self, job: Job, body: CompletionRequest):
        self._job = job
        self._body = body
        self._counter = UsageCounter(job)
        top = -1 if body.logprob_token_ids is not None else body.logprobs or 0
        self._form = LogprobFormat(job.serving.token_texts, top=top, as_token_ids=bool(body.return_tokens_as_token_ids))
        self._wants_logprobs = body.logprobs is not None or body.logprob_token_ids is not None
        special = job.serving.engine.tokenizer.all_special_ids if self._wants_logprobs and job.params.skip_special_tokens else ()
        self._hidden = frozenset(special)

    # ------------------------------------------------------------------------------------------------------ not streamed

    def whole(self, outputs: list[RequestOutput]) -> Completion:
        job = self._job
        choices = []
        for number, output in enumerate(outputs):
            self._counter.add(number, output)
            choices += [self._choice(number, output, choice) for choice in sorted(output.outputs, key=lambda choice: choice.index)]
        return Completion(
            id=job.response_id,
            created=job.created,
            model=job.model,
            system_fingerprint=job.serving.fingerprint,
            choices=choices,
            usage=self._counter.usage(),
        )

    def _choice(self, number: int, output: RequestOutput, choice: CompletionOutput) -> CompletionChoice:
        body, prompt = self._body, self._job.prompts[number]
        text, token_ids = ("", []) if self._job.scoring else (choice.text, choice.token_ids)
        logprobs = self._logprobs(prompt, output, choice) if self._wants_logprobs else None
        result = CompletionChoice(
            index=number * self._job.params.n + choice.index,
            text=self._echoed(prompt) + text if body.echo else text,
            logprobs=logprobs,
            finish_reason="length" if self._job.scoring else choice.finish_reason,
            stop_reason=None if self._job.scoring else choice.stop_reason,
        )
        if body.return_token_ids:
            result.token_ids, result.prompt_token_ids = token_ids, prompt.token_ids
        if body.prompt_logprobs is not None:
            result.prompt_logprobs = prompt_logprobs(output.prompt_logprobs, self._form)
        return result

    def _logprobs(self, prompt: Prompt, output: RequestOutput, choice: CompletionOutput) -> CompletionLogprobs:
        builder = CompletionLogprobsBuilder(self._form)
        found = CompletionLogprobs([], [], [], [])
        if self._body.echo and output.prompt_logprobs is not None:
            builder.add(prompt.token_ids, output.prompt_logprobs, self._hidden_in(prompt), found)
        return found if self._job.scoring else builder.add(choice.token_ids, choice.logprobs or [], self._hidden, found)

    def _hidden_in(self, prompt: Prompt) -> tuple[int, ...]:
        """The tokens of a prompt that its echo does not show: a beginning of sequence that the tokenizer added to the text."""
        tokenizer = self._job.serving.engine.tokenizer
        first = tokenizer.bos_token_id
        if prompt.text is None or first is None or prompt.text.startswith(tokenizer.token_bytes(first).decode(errors="replace")):
            return ()
        return (first,)

    def _echoed(self, prompt: Prompt) -> str:
        return self._job.serving.engine.tokenizer.decode(prompt.token_ids) if prompt.text is None else prompt.text

    # ---------------------------------------------------------------------------------------------------------- streamed

    async def stream(self, usage: UsageMode) -> AsyncGenerator[bytes, None]:
        """Frames, one write for each output of the engine."""
        job = self._job
        head = ChunkHead(
            id=job.response_id, object="text_completion", created=job.created, model=job.model, system_fingerprint=job.serving.fingerprint
        )
        builders: dict[int, CompletionLogprobsBuilder] = {}
        seen: set[int] = set()
        async for number, output in merged(job.start()):
            self._counter.add(number, output)
            tail = usage.tail(self._counter.usage() if usage.continuous else None)
            frames = []
            if number not in seen:
                seen.add(number)
                frames += self._opening(head, number, output, tail, builders)
            for choice in output.outputs:
                index = number * job.params.n + choice.index
                frame = self._frame(head, index, choice, tail, builders)
                if frame is not None:
                    frames.append(frame)
            if frames:
                yield b"".join(frames)
        if usage.include:
            yield head.usage(self._counter.usage())

    def _opening(
        self, head: ChunkHead, number: int, output: RequestOutput, tail: bytes, builders: dict[int, CompletionLogprobsBuilder]
    ) -> list[bytes]:
        """The echoed prompt with its logprobs, and its token ids, before the first token of a prompt's choices."""
        body, prompt = self._body, self._job.prompts[number]
        frames = []
        for index in range(number * self._job.params.n, (number + 1) * self._job.params.n):
            if self._wants_logprobs:
                builders[index] = CompletionLogprobsBuilder(self._form)
            if not body.echo and not body.return_token_ids:
                continue
            logprobs = b"null"
            if body.echo and self._wants_logprobs and output.prompt_logprobs is not None:
                logprobs = msgspec.json.encode(builders[index].add(prompt.token_ids, output.prompt_logprobs, self._hidden_in(prompt)))
            extra = member("prompt_token_ids", prompt.token_ids) if body.return_token_ids else b""
            frames.append(completion_chunk(head, index, self._echoed(prompt) if body.echo else "", tail, logprobs=logprobs, extra=extra))
        return frames

    def _frame(
        self, head: ChunkHead, index: int, choice: CompletionOutput, tail: bytes, builders: dict[int, CompletionLogprobsBuilder]
    ) -> bytes | None:
        if self._job.scoring:
            return completion_chunk(head, index, "", tail, finish=b'"length"') if choice.finish_reason else None
        finish, extra = finish_members(choice)
        logprobs = b"null"
        if choice.logprobs and index in builders:
            logprobs = msgspec.json.encode(builders[index].add(choice.token_ids, choice.logprobs, self._hidden))
        if self._body.return_token_ids and choice.token_ids:
            extra += member("token_ids", choice.token_ids)
        if not choice.text and not extra and logprobs == b"null":
            # Text that is held back: nothing to say yet.
            return None
        return completion_chunk(head, index, choice.text, tail, logprobs=logprobs, finish=finish, extra=extra)
