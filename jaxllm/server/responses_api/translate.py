"""From a request of the Responses API to one of chat completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.errors import NotSupportedError
from jaxllm.server.answering import translated
from jaxllm.server.conversation import Message
from jaxllm.server.prompts import render_chat
from jaxllm.server.protocol import ChatCompletionRequest
from jaxllm.server.responses_api.protocol import ResponsesRequest
from jaxllm.server.state import ServerState

# Fields of chat completions, as errors name them, and what they are called here.
FIELD_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "messages": "input",
    "logprobs": "top_logprobs",
}


def chat_request(body: ResponsesRequest, messages: Sequence[Message]) -> ChatCompletionRequest:
    """The chat request that makes the answer. Sampling fields that chat knows pass through as they are.

    Raises:
        InvalidRequestError, pydantic.ValidationError: a tool, a format or a passed field is at fault.
    """
    fields: dict[str, Any] = {
        **(body.model_extra or {}),
        "model": body.model,
        "messages": list(messages),
        "stream": body.stream,
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "tools": [chat_tool(tool, f"tools[{number}]") for number, tool in enumerate(body.tools or ())] or None,
        "tool_choice": _tool_choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _response_format((body.text or {}).get("format")),
        "reasoning_effort": (body.reasoning or {}).get("effort"),
    }
    if body.wants_logprobs:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    return translated(fields, FIELD_NAMES)


def chat_tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A function in chat's format. Raises NotSupportedError for the tools that OpenAI runs itself."""
    if tool.get("type") != "function":
        raise NotSupportedError(f"{where}.type must be 'function': tools run at the client; got {tool.get('type')!r:.200}", param="tools")
    function = {name: tool[name] for name in ("name", "description", "parameters", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: Any) -> Any:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "function" and isinstance(choice.get("name"), str):
        return {"type": "function", "function": {"name": choice["name"]}}
    if choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": list(map(_tool_choice, choice["tools"]))}}
    raise NotSupportedError(
        'tool_choice must be "none", "auto", "required", {"type": "function", "name": ...} or {"type": "allowed_tools", "mode": ..., '
        f'"tools": [...]}}; got {choice!r:.200}',
        param="tool_choice",
    )


def _response_format(given: Any) -> Any:
    if not isinstance(given, dict) or given.get("type") != "json_schema":
        return given
    schema = {name: given[name] for name in ("name", "description", "schema", "strict") if given.get(name) is not None}
    return {"type": "json_schema", "json_schema": schema}


async def fitted(state: ServerState, chat: ChatCompletionRequest) -> ChatCompletionRequest:
    """The request with as many of its oldest turns dropped as it takes to fit the context. Its system message stays.

    A turn begins with a message of the user, so that no result is left without its call. The last one always stays.
    """
    messages = chat.messages
    first = 1 if messages[0].get("role") in ("system", "developer") else 0
    starts = [number for number, message in enumerate(messages) if number > first and message.get("role") == "user"]
    cuts = [first, *starts]
    room = state.serving.engine.info.max_kept(chat.max_completion_tokens)

    async def fits(cut: int) -> bool:
        text = await render_chat(state, [*messages[:first], *messages[cut:]], chat)
        return len(await state.serving.tokenizing.encode(text, add_special_tokens=False, truncated=True)) <= room

    low, high = 0, len(cuts) - 1
    while low < high:
        middle = (low + high) // 2
        if await fits(cuts[middle]):
            high = middle
        else:
            low = middle + 1
    return chat.model_copy(update={"messages": [*messages[:first], *messages[cuts[low] :]]})


def check_logprobs(body: ResponsesRequest, *, parses: bool) -> None:
    """Raises NotSupportedError where log-probabilities of the answer's text are wanted, and the output holds more than that."""
    if body.wants_logprobs and parses:
        raise NotSupportedError(
            "log-probabilities of output_text are not offered together with tool calls or reasoning; leave them out of include",
            param="include",
        )
