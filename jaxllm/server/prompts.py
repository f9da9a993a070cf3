"""From what a request holds to token ids: prompts of completions, conversations of chat."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from jaxllm.errors import InvalidRequestError
from jaxllm.sampling_params import SamplingParams
from jaxllm.server.generating import Prompt
from jaxllm.server.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest, TemplateRequest
from jaxllm.server.sampling import asked_max_tokens
from jaxllm.server.state import ServerState, Serving

MAX_PROMPTS = 1024
# Sequences of one HTTP request, over all prompts.
MAX_SEQUENCES = 16_384
# Fewer are rendered in less time than a hop to another thread is worth.
_INLINE_MESSAGES = 256


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


async def chat_prompt(state: ServerState, body: ChatCompletionRequest) -> Prompt:
    """The rendered conversation of /v1/chat/completions."""
    text = await render_chat(state, body.messages, body)
    ids = await state.serving.tokenizing.encode(
        text, add_special_tokens=bool(body.add_special_tokens), truncated=body.truncate_prompt_tokens is not None
    )
    return _fitted(state.serving, body, text, ids)


async def render_chat(state: ServerState, messages: Sequence[Mapping[str, Any]], request: TemplateRequest) -> str:
    """The prompt of a conversation; a long one is rendered in a thread.

    Raises:
        InvalidRequestError: a message that is none, options that exclude each other, an untrusted template, or one that refuses
            the conversation.
    """
    if request.chat_template is not None and not state.config.trust_request_chat_template:
        raise InvalidRequestError(
            "chat_template is not taken from requests; start the server with --trust-request-chat-template, or with --chat-template",
            param="chat_template",
        )
    variables = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort == "none":
        # Templates of different families read different names.
        variables = {"enable_thinking": False, "thinking": False, **variables}
    if request.reasoning_effort is not None:
        variables["reasoning_effort"] = request.reasoning_effort
    _check_content(messages)
    continues = bool(request.continue_final_message)
    render = partial(
        state.serving.engine.tokenizer.apply_chat_template,
        messages,
        request.tools,
        add_generation_prompt=not continues if request.add_generation_prompt is None else request.add_generation_prompt,
        continue_final_message=continues,
        chat_template=request.chat_template,
        documents=request.documents,
        variables=variables,
    )
    return render() if len(messages) <= _INLINE_MESSAGES else await asyncio.to_thread(render)


def _check_content(messages: Sequence[Mapping[str, Any]]) -> None:
    """Only the assistant may say nothing, where it called tools or is to be continued; templates would print "None" for others."""
    for number, message in enumerate(messages):
        if message.get("content") is None and message.get("role") != "assistant":
            where = f"messages[{number}].content"
            raise InvalidRequestError(f"{where} must be text or a list of text parts, got null", param="messages")


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
    info = serving.engine.info
    limit = info.max_prompt_len + 1
    name, max_tokens = asked_max_tokens(body)
    keep = body.truncate_prompt_tokens
    if keep is not None:
        if keep == -1:
            keep = info.max_kept(max_tokens)
        elif not 1 <= keep <= limit:
            raise InvalidRequestError(
                f"truncate_prompt_tokens must be from 1 to the context's {limit} tokens, or -1 for what fits; got {keep}",
                param="truncate_prompt_tokens",
            )
        ids = ids[:keep] if body.truncation_side == "right" else ids[-keep:]
    # A prompt that fills the context alone is refused with the engine's own words.
    room = info.room(len(ids))
    if max_tokens is not None and 0 < room < max_tokens:
        raise InvalidRequestError(
            f"{name}={max_tokens} is too large: the context holds {info.max_model_len} tokens and the prompt has {len(ids)}; "
            f"ask for at most {room}",
            param=name,
        )
    return Prompt(text, list(ids))
