"""POST /inference/v1/generate: token ids in, token ids out, for callers that tokenise themselves."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any, Literal

import msgspec
from fastapi import APIRouter
from msgspec import UNSET, UnsetType
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from jaxllm.errors import InvalidRequestError, NotSupportedError
from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.sampling_params import RequestOutputKind, SamplingParams, refused
from jaxllm.server.body import read_body
from jaxllm.server.generating import Job, Prompt, UsageCounter, final_outputs, merged, new_job
from jaxllm.server.logprobs import LogprobFormat, prompt_logprobs
from jaxllm.server.openapi import documented
from jaxllm.server.protocol import ApiRequest, Int, Ints, StreamOptions
from jaxllm.server.responses import ChatLogprobs, PromptLogprobs, Usage, json_response
from jaxllm.server.state import State, request_scope
from jaxllm.server.streaming import EventStream, frame_of

router = APIRouter(tags=["generation"])

# Sampling parameters that the server sets itself.
_OURS = ("output_kind", "eos_token_ids", "bad_words_token_ids", "detokenize", "output_grammar", "reasoning_marks")
_FIELDS = tuple(field.name for field in msgspec.structs.fields(SamplingParams) if field.name not in _OURS)


class GenerateRequest(ApiRequest):
    """Body of POST /inference/v1/generate."""

    token_ids: Ints = Field(min_length=1, description="The prompt")
    sampling_params: dict[str, Any] = Field({}, description="Fields of SamplingParams. max_tokens defaults to what the context leaves")
    output_mode: Literal["tokens", "text"] = Field("tokens", description="text: choices have their text as well")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    features: Any = Field(None, description="Multimodal inputs, which are not supported yet")

    @property
    def max_tokens(self) -> int | None:
        return self.sampling_params.get("max_tokens")

    def check(self) -> None:
        super().check()
        if self.features is not None:
            raise NotSupportedError("features need a multimodal model, which is not supported yet", param="features")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options needs stream=true", param="stream_options")

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Raises InvalidRequestError where a field is unknown or out of its range."""
        unknown = [name for name in self.sampling_params if name not in _FIELDS]
        if unknown:
            raise InvalidRequestError(
                f"sampling_params has no field {unknown[0]!r:.100}; it has {', '.join(_FIELDS)}", param="sampling_params"
            )
        wants_text = self.output_mode == "text" or bool(self.sampling_params.get("stop"))
        fields = {"max_tokens": None, **defaults, **self.sampling_params, "detokenize": wants_text}
        fields["output_kind"] = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        try:
            return msgspec.convert(fields, SamplingParams)
        except msgspec.ValidationError as error:
            if isinstance(error.__cause__, InvalidRequestError):
                raise error.__cause__ from None
            raise refused(error, fields) from None


class GeneratedChoice(msgspec.Struct, kw_only=True):
    index: int
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: ChatLogprobs | None = None
    text: str | UnsetType = UNSET


class Generated(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Body of a response of /inference/v1/generate; in a stream, of every event: then choices hold what is new."""

    request_id: str
    choices: list[GeneratedChoice]
    usage: Usage | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET


@router.post("/inference/v1/generate", **documented(GenerateRequest, Generated))
async def generate(request: Request, state: State) -> Response:
    """Generate from token ids."""
    serving = state.serving
    body = await read_body(request, GenerateRequest)
    params = body.params(serving.engine.default_sampling_params)
    job = new_job(state, request, body, prefix="gen", prompts=[Prompt(None, body.token_ids)], params=params)
    writer = _Writer(job, body)
    if body.stream:
        return EventStream(state, writer.stream())
    async with request_scope(state, request.receive):
        (output,) = await final_outputs(job.start())
    return json_response(writer.whole(output))


class _Writer:
    def __init__(self, job: Job, body: GenerateRequest):
        self._job = job
        self._body = body
        self._counter = UsageCounter(job)
        top = -1 if job.params.logprob_token_ids is not None else job.params.logprobs or 0
        self._form = LogprobFormat(job.serving.token_texts, top=top, as_token_ids=True)

    def whole(self, output: RequestOutput) -> Generated:
        self._counter.add(0, output)
        choices = [self._choice(choice) for choice in sorted(output.outputs, key=lambda choice: choice.index)]
        result = Generated(request_id=self._job.response_id, choices=choices, usage=self._counter.usage())
        if self._job.params.prompt_logprobs is not None:
            result.prompt_logprobs = prompt_logprobs(output.prompt_logprobs, self._form)
        return result

    async def stream(self) -> AsyncGenerator[bytes, None]:
        async for _, output in merged(self._job.start()):
            self._counter.add(0, output)
            yield frame_of(Generated(request_id=self._job.response_id, choices=[self._choice(choice) for choice in output.outputs]))
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            yield frame_of(Generated(request_id=self._job.response_id, choices=[], usage=self._counter.usage()))

    def _choice(self, choice: CompletionOutput) -> GeneratedChoice:
        return GeneratedChoice(
            index=choice.index,
            token_ids=list(choice.token_ids),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            logprobs=self._form.chat(choice.token_ids, choice.logprobs) if choice.logprobs else None,
            text=choice.text if self._body.output_mode == "text" else UNSET,
        )
