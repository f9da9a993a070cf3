"""From request fields to sampling parameters, over the model's own defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from jaxllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from jaxllm.server.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest
from jaxllm.server.structured import structured_outputs

# Request fields that are sampling parameters of the same name, but for what the server settles itself.
_SETTLED = ("max_tokens", "truncate_prompt_tokens", "structured_outputs")
_SAME_NAME = [
    field.name
    for field in msgspec.structs.fields(SamplingParams)
    if field.name in GenerationRequest.model_fields and field.name not in _SETTLED
]


def _params(request: GenerationRequest, defaults: Mapping[str, Any], max_tokens: int | None, **more: Any) -> SamplingParams:
    chosen = {name: value for name in _SAME_NAME if (value := getattr(request, name)) is not None}
    limit = defaults.get("max_tokens")
    # The default is a limit for everybody, as vLLM has it.
    limits = [value for value in (max_tokens, limit) if value is not None]
    kind = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
    return SamplingParams(**{**defaults, **chosen, **more, "max_tokens": min(limits, default=None), "output_kind": kind})


def completion_params(request: CompletionRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    """Raises InvalidRequestError where a value is out of its range. max_tokens=0 (scoring) generates one token, to be dropped."""
    more: dict[str, Any] = {}
    if request.logprobs is not None:
        more["logprobs"] = request.logprobs
        if request.echo and request.prompt_logprobs is None:
            more["prompt_logprobs"] = request.logprobs
    max_tokens = 16 if request.max_tokens is None else max(request.max_tokens, 1) if request.echo else request.max_tokens
    return _params(request, defaults, max_tokens, structured_outputs=structured_outputs(request), **more)


def chat_params(
    request: ChatCompletionRequest,
    defaults: Mapping[str, Any],
    constraint: StructuredOutputsParams | None,
    *,
    keep_special_tokens: bool = False,
) -> SamplingParams:
    """Raises InvalidRequestError where a value is out of its range. Without max_tokens the context is the limit.

    Args:
        constraint: what the output must look like, calls included.
        keep_special_tokens: the output is parsed by markers that are special tokens, whatever the request says of them.
    """
    more: dict[str, Any] = {"structured_outputs": constraint, "thinking_token_budget": request.thinking_token_budget}
    if keep_special_tokens:
        more["skip_special_tokens"] = False
    if request.logprobs and request.logprob_token_ids is None:
        more["logprobs"] = request.top_logprobs or 0
    max_tokens = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    return _params(request, defaults, max_tokens, **more)


def asked_max_tokens(request: GenerationRequest) -> tuple[str, int | None]:
    """The field that limits the output, and its value as the client gave it."""
    if isinstance(request, ChatCompletionRequest) and request.max_completion_tokens is not None:
        return "max_completion_tokens", request.max_completion_tokens
    return "max_tokens", request.max_tokens
