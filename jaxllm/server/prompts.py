"""From what a request holds to token ids: prompts of completions, conversations of chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxllm.errors import InvalidRequestError
from jaxllm.sampling_params import SamplingParams
from jaxllm.server.chat import render_chat
from jaxllm.server.generating import Prompt
from jaxllm.server.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest
from jaxllm.server.sampling import asked_max_tokens
from jaxllm.server.state import Serving

MAX_PROMPTS = 1024
# Sequences of one HTTP request, over all prompts.
MAX_SEQUENCES = 16_384


async def completion_prompts(serving: Serving, body: CompletionRequest, params: SamplingParams) -> list[Prompt]:
    """The prompts of /v1/completions.

    Raises:
        InvalidRequestError: `prompt` is neither text, token ids nor a list of either, there are too many, or one is too long.
    """
    given = split_prompts(body.prompt, "prompt", MAX_PROMPTS)
    if len(given) * params.n > MAX_SEQUENCES:
        raise InvalidRequestError(
            f"{len(given)} prompts with n={params.n} come to {len(given) * params.n} sequences; at most {MAX_SEQUENCES} are allowed",
            param="n",
        )
    special = True if body.add_special_tokens is None else body.add_special_tokens
    texts = [item for item in given if isinstance(item, str)]
    encoded = await serving.tokenizing.encode_all(texts, add_special_tokens=special, truncated=body.truncate_prompt_tokens is not None)
    of_texts = iter(encoded)
    return [_fitted(serving, body, item, next(of_texts)) if isinstance(item, str) else _fitted(serving, body, None, item) for item in given]


async def chat_prompt(serving: Serving, body: ChatCompletionRequest, *, trust_template: bool) -> Prompt:
    """The rendered conversation of /v1/chat/completions."""
    text = render_chat(serving.engine.tokenizer, body.messages, body, trust_template=trust_template)
    ids = await serving.tokenizing.encode(
        text, add_special_tokens=bool(body.add_special_tokens), truncated=body.truncate_prompt_tokens is not None
    )
    return _fitted(serving, body, text, ids)


def split_prompts(prompt: Any, name: str, most: int) -> list[str | list[int]]:
    """The prompts in the field `name`: text, token ids, or a list of at most `most` of either."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if _is_ids(prompt):
            return [prompt]
        if len(prompt) > most:
            raise InvalidRequestError(f"{name} may hold at most {most} prompts, got {len(prompt)}; split them over requests", param=name)
        if all(isinstance(item, str) or _is_ids(item) for item in prompt):
            return prompt
    shown = "an empty list" if prompt == [] else type(prompt).__name__
    raise InvalidRequestError(
        f"{name} must be text, a list of token ids, or a list of texts or of lists of token ids, none of them empty; got {shown}"
        + (" with other items" if isinstance(prompt, list) and prompt else ""),
        param=name,
    )


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and set(map(type, value)) == {int}


def _fitted(serving: Serving, body: GenerationRequest, text: str | None, ids: Sequence[int]) -> Prompt:
    """Truncate as asked, and check that prompt and output fit the context together."""
    limit = serving.engine.info.max_model_len
    name, max_tokens = asked_max_tokens(body)
    keep = body.truncate_prompt_tokens
    if keep is not None:
        if keep == -1:
            keep = max(1, limit - max(1, max_tokens or 1))
        elif not 1 <= keep <= limit:
            raise InvalidRequestError(
                f"truncate_prompt_tokens must be from 1 to the context's {limit} tokens, or -1 for what fits; got {keep}",
                param="truncate_prompt_tokens",
            )
        ids = ids[:keep] if body.truncation_side == "right" else ids[-keep:]
    # A prompt that fills the context alone is refused with the engine's own words.
    room = limit - len(ids)
    if max_tokens is not None and 0 < room < max_tokens:
        raise InvalidRequestError(
            f"{name}={max_tokens} is too large: the context holds {limit} tokens and the prompt has {len(ids)}; ask for at most {room}",
            param=name,
        )
    return Prompt(text, list(ids))
