"""What a request to /v1/responses may hold."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from jaxllm.errors import InvalidRequestError, NotSupportedError
from jaxllm.server.protocol import ApiRequest, FewPairs, Float, Int, Objects, Strings, refuse_fields

LOGPROBS = "message.output_text.logprobs"
# Reasoning items come with their full text, so that there is nothing to encrypt for clients that keep them.
_INCLUDABLE = (LOGPROBS, "reasoning.encrypted_content")
# Fields of OpenAI's API that nothing here stands behind: name -> (values that ask for nothing, why the others are refused).
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "conversation": ((), "is not offered; continue a conversation with previous_response_id"),
    "prompt": ((), "is not offered: there are no stored prompt templates; use instructions and input"),
    "context_management": (([],), "is not offered; use truncation 'auto'"),
    "moderation": ((), "is not offered"),
    "service_tier": (("auto", "default"), "must be 'auto' or 'default'; order requests with priority"),
}
# Fields of chat completions that have another name here.
_OTHER_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": f"include: ['{LOGPROBS}']",
}
# Fields of chat completions that mean nothing for a response.
_FOREIGN = ("n", "echo", "continue_final_message", "add_generation_prompt", "prompt_logprobs", "return_token_ids", "logprob_token_ids")

_INPUT_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}


class ResponsesRequest(ApiRequest):
    """Body of POST /v1/responses. Sampling fields of chat completions (top_k, seed, stop, ...) are taken as well."""

    input: Annotated[Any, WithJsonSchema(_INPUT_SCHEMA)] = Field(
        description="Text, or a list of items: messages, calls, outputs of calls, ..."
    )
    instructions: str | None = Field(None, description="System message of this response; not carried over to the next one")
    previous_response_id: str | None = Field(None, description="A stored response whose conversation goes on")
    max_output_tokens: Int | None = Field(None, ge=1, description="Most tokens to generate, reasoning included. Default: what fits")
    temperature: Float | None = None
    top_p: Float | None = None
    metadata: Annotated[dict[str, str], FewPairs] | None = Field(None, max_length=16, description="At most 16, given back as they are")
    store: bool | None = Field(None, description="Keep the response for retrieval and continuation. Default: true")
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    background: bool | None = Field(None, description="Answer at once and generate behind it; poll GET /v1/responses/{id}")
    text: dict[str, Any] | None = Field(None, description="format: text, json_object or json_schema")
    tools: Objects | None = Field(None, description="Functions that the model may call")
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Int | None = Field(None, description="Limits built-in tools, of which there are none")
    reasoning: dict[str, Any] | None = Field(None, description="effort: a variable for the chat template")
    include: Strings | None = None
    top_logprobs: Int | None = Field(None, description=f"Alternatives per token; needs {LOGPROBS} in include")
    truncation: Literal["auto", "disabled"] | None = Field(None, description="auto drops the oldest turns of an over-long conversation")
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    service_tier: str | None = None
    conversation: Any = None
    prompt: Any = None
    context_management: Any = None
    moderation: Any = None

    def check(self) -> None:
        super().check()
        refuse_fields(self, _REFUSED, _OTHER_NAMES, _FOREIGN, "responses")
        if self.background and self.stream:
            raise NotSupportedError("stream=true is not offered with background=true; poll the response instead", param="stream")
        if self.background and self.store is False:
            raise InvalidRequestError("background=true needs store=true: the response is fetched later", param="store")
        self._check_parts()

    def _check_parts(self) -> None:
        for name in self.include or ():
            if name not in _INCLUDABLE:
                raise NotSupportedError(f"include may hold {', '.join(_INCLUDABLE)}; got {name!r:.200}", param="include")
        if self.top_logprobs and not self.wants_logprobs:
            raise InvalidRequestError(f"top_logprobs needs {LOGPROBS!r} in include", param="top_logprobs")
        if (self.stream_options or {}).get("include_obfuscation"):
            raise NotSupportedError("stream_options.include_obfuscation is not offered; leave it out", param="stream_options")
        summary = (self.reasoning or {}).get("summary") or (self.reasoning or {}).get("generate_summary")
        if summary not in (None, "auto"):
            raise NotSupportedError(
                f"reasoning.summary must be 'auto' or null: reasoning comes in full; got {summary!r:.200}", param="reasoning.summary"
            )
        verbosity = (self.text or {}).get("verbosity")
        if verbosity not in (None, "medium"):
            raise NotSupportedError(f"text.verbosity must be 'medium' or null, got {verbosity!r:.200}", param="text.verbosity")

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())
