"""What requests may hold: the fields of OpenAI's API and those that vLLM adds, validated and documented (/docs)."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from jaxllm.engine.input_processor import MAX_REQUEST_TOKENS
from jaxllm.errors import InvalidRequestError, NotSupportedError

logger = logging.getLogger(__name__)

MAX_STOP_STRINGS = 4
MAX_REQUEST_ID_CHARS = 256
MAX_PAIRS = 1024

_LATER = "is not supported yet"
# Fields that users of other servers know and that we do not offer: name -> (values that ask for nothing, why the others are refused).
REFUSED_FIELDS: dict[str, tuple[tuple[Any, ...], str]] = {
    "best_of": ((1,), "is gone; use n"),
    "suffix": (("",), f"{_LATER}: the prompt is completed at its end"),
    "use_beam_search": ((False,), "is not served over HTTP; use LLM.beam_search"),
    "length_penalty": ((1,), "belongs to beam search; use LLM.beam_search"),
    "guided_json": ((), "is gone; use structured_outputs.json"),
    "guided_regex": ((), "is gone; use structured_outputs.regex"),
    "guided_choice": ((), "is gone; use structured_outputs.choice"),
    "guided_grammar": ((), "is gone; use structured_outputs.grammar"),
    "guided_whitespace_pattern": ((), "is gone; use structured_outputs.whitespace_pattern"),
    "guided_decoding_backend": ((), "is gone; there is one backend"),
    "structural_tag": ((), "goes into structured_outputs or response_format"),
    "json_schema": ((), "goes into response_format"),
    "regex": ((), "goes into structured_outputs"),
    "ebnf": ((), "is another server's name; use structured_outputs.grammar"),
    "grammar": ((), "goes into structured_outputs"),
    "repetition_detection": ((), _LATER),
    "return_token_offsets": ((False,), _LATER),
    "return_prompt_text": ((False,), _LATER),
    "stream_interval": ((1,), "must be 1: every step is streamed"),
    "watermarking": ((False,), _LATER),
    "kv_transfer_params": ((), _LATER),
    "vllm_xargs": (({},), _LATER),
    "prompt_embeds": ((), _LATER),
    "mm_processor_kwargs": (({},), "needs a multimodal model, which is not supported yet"),
    "media_io_kwargs": (({},), "needs a multimodal model, which is not supported yet"),
    "modalities": ((["text"],), "must be ['text']: audio output is not supported"),
    "audio": ((), "is not supported: this server answers in text"),
    "functions": (([],), "is not supported; use tools with tool_choice 'none' to render functions into the prompt"),
    "function_call": (("none",), "is not supported yet: calls are not parsed"),
}


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("Input should be a number")
    return value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _no_more_pairs(value: Any) -> Any:
    """Checked before the pairs are: each of millions could be at fault."""
    if isinstance(value, dict) and len(value) > MAX_PAIRS:
        raise ValueError(f"Input should have at most {MAX_PAIRS} entries, and has {len(value)}")
    return value


def _bool_is_count(value: Any) -> Any:
    """`logprobs: true` asks for one, false for none."""
    return (1 if value else None) if isinstance(value, bool) else value


Int = Annotated[int, BeforeValidator(_no_bool)]
Float = Annotated[float, BeforeValidator(_no_bool)]
Count = Annotated[int | None, BeforeValidator(_bool_is_count)]
# Of millions of items that are at fault, one is told. A request cannot do with more ids than it may hold.
Ints = Annotated[list[Int], Field(fail_fast=True, max_length=MAX_REQUEST_TOKENS)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
Strings = Annotated[list[str], Field(fail_fast=True), BeforeValidator(_as_list)]
FewPairs = BeforeValidator(_no_more_pairs)


class ApiRequest(BaseModel):
    """What every request shares. Fields that nobody knows are accepted, as OpenAI clients expect."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str | None = Field(None, description="Name of the model; one of /v1/models. Default: the served model")

    def check(self) -> None:
        """What concerns several fields at once. Raises InvalidRequestError, which pydantic would wrap if a validator raised it."""
        refuse_fields(self, REFUSED_FIELDS)
        for name in (self.model_extra or {}).keys() - REFUSED_FIELDS.keys():
            logger.debug("ignoring the unknown request field %r", name)


def refuse_fields(
    body: ApiRequest,
    refused: Mapping[str, tuple[tuple[Any, ...], str]],
    other_names: Mapping[str, str] | None = None,
    foreign: Collection[str] = (),
    where: str = "",
) -> None:
    """Refuse fields that nothing stands behind (name -> the values that ask for nothing, and why the others are refused); and of another
    API's request those fields of chat completions that have another name there, or mean nothing.

    Raises:
        InvalidRequestError: one of them is set.
    """
    for name, (neutral, reason) in refused.items():
        value = getattr(body, name, None)
        if value is not None and value not in neutral:
            raise NotSupportedError(f"{name} {reason}; got {value!r:.200}", param=name)
    for name in body.model_extra or {}:
        if other_names and name in other_names:
            raise InvalidRequestError(f"{name} is a field of chat completions; use {other_names[name]} here", param=name)
        if name in foreign:
            raise NotSupportedError(f"{name} is not offered for {where}; use /v1/chat/completions", param=name)


class StreamOptions(BaseModel):
    include_usage: bool | None = Field(None, description="Send a last chunk with the usage of the whole request")
    continuous_usage_stats: bool | None = Field(None, description="Send the usage so far with every chunk")


class GenerationRequest(ApiRequest):
    """Sampling and output fields that completions and chat share. What is not set comes from the model's generation config."""

    n: Int | None = Field(None, description="Sequences per prompt")
    stream: bool | None = Field(None, description="Send the output as server-sent events while it is made")
    stream_options: StreamOptions | None = None
    temperature: Float | None = Field(None, description="0 (greedy) to 2")
    top_p: Float | None = None
    top_k: Int | None = Field(None, description="0 or -1 turns it off")
    min_p: Float | None = None
    presence_penalty: Float | None = None
    frequency_penalty: Float | None = None
    repetition_penalty: Float | None = None
    seed: Int | None = None
    logit_bias: Annotated[dict[int, Float], FewPairs] | None = Field(None, description="Token id -> bias, -100 to 100")
    stop: Strings | None = Field(None, max_length=MAX_STOP_STRINGS, description=f"At most {MAX_STOP_STRINGS} strings that end the output")
    stop_token_ids: Ints | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Int | None = None
    max_tokens: Int | None = Field(None, description="Most tokens to generate. Default: 16 for completions, what fits for chat")
    bad_words: Strings | None = None
    allowed_token_ids: Ints | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: Int | None = Field(None, description="Keep this many tokens of the prompt; -1: as many as fit")
    truncation_side: Literal["left", "right"] | None = Field(None, description="Where truncation cuts. Default: left")
    prompt_logprobs: Count = Field(None, description="Top log-probabilities per prompt token; not with stream")
    logprob_token_ids: Ints | None = Field(None, description="Token ids whose log-probabilities are wanted at every position")
    response_format: dict[str, Any] | None = Field(None, description="type: text, json_object, json_schema or structural_tag")
    structured_outputs: dict[str, Any] | None = Field(
        None, description="One of json, regex, choice, grammar, json_object and structural_tag: what the output must look like"
    )
    echo: bool | None = Field(None, description="Put the prompt (chat: the message being continued) before the output")
    add_special_tokens: bool | None = Field(None, description="Add the tokenizer's special tokens to text. Default: true; chat: false")
    priority: Int | None = Field(None, description="Lower is served first, with the priority policy")
    cache_salt: str | None = Field(None, description="Prefixes are shared only between requests of equal salt")
    request_id: str | None = Field(None, description="Name of this request in ids and logs; the header X-Request-Id goes before it")
    return_token_ids: bool | None = Field(None, description="Also return token ids of prompt and output")
    return_tokens_as_token_ids: bool | None = Field(None, description='Show tokens in logprobs as "token_id:N"')
    user: str | None = None

    def check(self) -> None:
        super().check()
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options needs stream=true", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequestError("prompt_logprobs cannot be streamed; send stream=false", param="prompt_logprobs")

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Like OpenAI's servers, only together with include_usage."""
        return bool(self.stream_options and self.stream_options.include_usage and self.stream_options.continuous_usage_stats)


PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        {"type": "array", "items": {"type": "integer"}},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
    ]
}


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    # Checked by hand (`prompts.completion_prompts`): a union of lists would be tried item by item.
    prompt: Annotated[Any, WithJsonSchema(PROMPT_SCHEMA)] = Field(description="Text or token ids, or a list of either")
    logprobs: Count = Field(None, description="Top log-probabilities per token")

    def check(self) -> None:
        super().check()
        refuse_fields(self, {"thinking_token_budget": ((-1,), "needs a conversation; use /v1/chat/completions")})
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequestError("max_tokens must be at least 1, got 0; with echo=true, 0 scores the prompt", param="max_tokens")


class TemplateRequest(ApiRequest):
    """What a request says to the chat template beside its messages."""

    tools: Objects | None = Field(None, description="Functions that the model may call")
    add_generation_prompt: bool | None = Field(None, description="End the prompt with the start of an answer. Default: true")
    continue_final_message: bool | None = Field(None, description="Leave the last message open and continue it")
    chat_template: str | None = Field(None, description="Template for this request; needs --trust-request-chat-template")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables for the template")
    documents: Objects | None = Field(None, description="Documents for templates that show them")
    reasoning_effort: str | None = Field(None, description="Variable for the template; 'none' turns thinking off")


class ChatCompletionRequest(GenerationRequest, TemplateRequest):
    """Body of POST /v1/chat/completions."""

    # Checked where they are rendered: templates decide what a message may hold.
    messages: Objects = Field(description="The conversation: objects with role and content (text, or a list of text parts)")
    max_tokens: Int | None = Field(None, ge=1, description="Most tokens to generate. Default: what fits")
    max_completion_tokens: Int | None = Field(None, ge=1, description="Most tokens to generate; goes before max_tokens")
    logprobs: bool | None = Field(None, description="Return the log-probability of each token")
    top_logprobs: Int | None = Field(None, description="Top log-probabilities per token; needs logprobs")
    tool_choice: Any = Field(None, description="'auto' (the default with tools), 'none', 'required', a function, or allowed_tools")
    parallel_tool_calls: bool | None = Field(None, description="false: one call at most. Default: true")
    include_reasoning: bool | None = Field(None, description="Return what the model reasoned. Default: true")
    thinking_token_budget: Int | None = Field(None, description="Tokens that reasoning may take before it is ended; -1: any number")

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs=true", param="top_logprobs")
        if self.logprob_token_ids is not None and not self.logprobs:
            raise InvalidRequestError("logprob_token_ids needs logprobs=true", param="logprob_token_ids")
        check_tools(self.tools, self.tool_choice)


class TokenizeRequest(TemplateRequest):
    """Body of POST /tokenize: a prompt, or a conversation to be rendered."""

    prompt: str | None = None
    messages: Objects | None = None
    add_special_tokens: bool | None = Field(None, description="Default: true for a prompt, false for messages")
    return_token_strs: bool | None = None

    def check(self) -> None:
        super().check()
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("give either prompt or messages", param="prompt")


class DetokenizeRequest(ApiRequest):
    """Body of POST /detokenize."""

    tokens: Ints


def check_tools(tools: list[dict[str, Any]] | None, tool_choice: Any) -> None:
    """Whether tools are well formed, and there where the choice needs them."""
    if tools is None:
        if tool_choice not in (None, "none", "auto"):
            raise InvalidRequestError(f"tool_choice {tool_choice!r:.200} needs tools", param="tool_choice")
        return
    if not tools:
        raise InvalidRequestError("tools must not be empty; leave it out instead", param="tools")
    for number, tool in enumerate(tools):
        function = tool.get("function")
        if tool.get("type", "function") != "function" or not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequestError(
                f'tools[{number}] must be {{"type": "function", "function": {{"name": ..., "parameters": ...}}}}, got {tool!r:.200}',
                param="tools",
            )
