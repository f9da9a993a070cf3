"""What requests to /v1/messages and /v1/messages/count_tokens may hold."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, WithJsonSchema

from jaxllm.errors import InvalidRequestError, NotSupportedError
from jaxllm.server.protocol import ApiRequest, Float, Int, Objects, Strings, refuse_fields

MIN_THINKING_BUDGET = 1024

# Fields of Anthropic's API that nothing here stands behind: name -> (values that ask for nothing, why the others are refused).
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "container": ((), "is not offered: no code runs here"),
    "mcp_servers": (([],), "is not offered; call tools at the client"),
    "service_tier": (("auto", "standard_only"), "must be 'auto' or 'standard_only'; order requests with priority"),
    "speed": (("standard",), "must be 'standard'"),
}
# Fields of chat completions that have another name here.
_OTHER_NAMES = {
    "stop": "stop_sequences",
    "max_completion_tokens": "max_tokens",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}
# Fields of chat completions that mean nothing for a message.
_FOREIGN = (
    "n",
    "echo",
    "logprobs",
    "top_logprobs",
    "continue_final_message",
    "add_generation_prompt",
    "prompt_logprobs",
    "return_token_ids",
)

_TEXT_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}


class Thinking(BaseModel):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Int | None = Field(None, ge=MIN_THINKING_BUDGET)


class CountTokensRequest(ApiRequest):
    """Body of POST /v1/messages/count_tokens."""

    messages: Objects = Field(min_length=1, description="The conversation: objects with role and content (text, or a list of blocks)")
    system: Annotated[Any, WithJsonSchema(_TEXT_SCHEMA)] = Field(None, description="System prompt: text, or a list of text blocks")
    tools: Objects | None = Field(None, description="Tools that the model may call")
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = Field(None, description="enabled (with budget_tokens), adaptive or disabled")
    output_config: dict[str, Any] | None = Field(None, description="effort: a variable for the chat template; format: json_schema")
    output_format: dict[str, Any] | None = Field(None, description="Older name of output_config.format")
    cache_control: dict[str, Any] | None = Field(None, description="Taken and not needed: every prefix is cached")
    container: Any = None
    mcp_servers: Any = None
    context_management: Any = None

    @property
    def token_limit(self) -> int | None:
        """Most tokens that the answer may have."""
        return None

    def check(self) -> None:
        super().check()
        refuse_fields(self, _REFUSED, _OTHER_NAMES, _FOREIGN, "messages")
        if not _asks_for_nothing(self.context_management):
            raise NotSupportedError(f"context_management is not offered; got {self.context_management!r:.200}", param="context_management")
        if self.thinking is not None and self.thinking.type == "enabled":
            budget, limit = self.thinking.budget_tokens, self.token_limit
            if budget is None or (limit is not None and budget >= limit):
                raise InvalidRequestError(
                    f"thinking.budget_tokens must be at least {MIN_THINKING_BUDGET} and less than max_tokens={limit}, got {budget}",
                    param="thinking.budget_tokens",
                )


def _asks_for_nothing(management: Any) -> bool:
    """Whether every edit keeps everything."""
    edits = management.get("edits") or [] if isinstance(management, dict) else management
    return edits is None or (isinstance(edits, list) and all(isinstance(edit, dict) and edit.get("keep") == "all" for edit in edits))


class MessagesRequest(CountTokensRequest):
    """Body of POST /v1/messages. Sampling fields of chat completions (min_p, seed, ...) are taken as well."""

    max_tokens: Int = Field(description="Most tokens to generate")
    stop_sequences: Strings | None = None
    stream: bool | None = None
    temperature: Float | None = None
    top_p: Float | None = None
    top_k: Int | None = None
    metadata: dict[str, Any] | None = Field(None, description="Taken and not used")
    service_tier: str | None = None
    speed: Literal["standard", "fast"] | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens
