"""Conversations: checked, brought into the shape that chat templates read, and rendered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from jaxllm.errors import InvalidRequestError, NotSupportedError

if TYPE_CHECKING:
    from jaxllm.text.tokenizer import Tokenizer

# Types of content parts that hold text, and the member that holds it.
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
_MEDIA_PARTS = ("image", "audio", "video", "file")
# Arguments of `Tokenizer.apply_chat_template` that are no variables of a template, or have a request field of their own.
_RESERVED_KWARGS = (
    "self",
    "messages",
    "tools",
    "documents",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "content_format",
    "tokenize",
)


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | None = None,
    chat_template: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    documents: list[dict[str, Any]] | None = None,
    reasoning_effort: str | None = None,
    trust_template: bool,
) -> str:
    """The prompt of a conversation.

    Raises:
        InvalidRequestError: a message that is none, options that exclude each other, an untrusted template, or one that refuses
            the conversation.
    """
    if chat_template is not None and not trust_template:
        raise InvalidRequestError(
            "chat_template is not taken from requests; start the server with --trust-request-chat-template, or with --chat-template",
            param="chat_template",
        )
    if continue_final_message and add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt exclude each other; set one of them", param="continue_final_message"
        )
    variables = dict(template_kwargs or {})
    for name in _RESERVED_KWARGS:
        if name in variables:
            raise InvalidRequestError(
                f"chat_template_kwargs may not hold {name!r}: it has a field of its own, or is none of the template's variables",
                param="chat_template_kwargs",
            )
    if reasoning_effort is not None:
        variables["reasoning_effort"] = reasoning_effort
    return tokenizer.apply_chat_template(
        read_messages(messages, template=chat_template or tokenizer.chat_template or ""),
        tools,
        add_generation_prompt=not continue_final_message if add_generation_prompt is None else add_generation_prompt,
        continue_final_message=bool(continue_final_message),
        chat_template=chat_template,
        documents=documents,
        **variables,
    )


def read_messages(messages: Sequence[Mapping[str, Any]], *, template: str) -> list[dict[str, Any]]:
    """Messages as templates read them: text parts under one name, arguments of tool calls as objects.

    `developer` becomes `system` for a template that does not know it.

    Raises:
        InvalidRequestError: something that no template can show; `param` is its path.
    """
    if not messages:
        raise InvalidRequestError("messages must hold at least one message", param="messages", value=[])
    found = []
    for number, message in enumerate(messages):
        path = f"messages.{number}"
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise InvalidRequestError(
                f"{path}.role must be a name such as system, user, assistant or tool; got {role!r:.200}", param=f"{path}.role", value=role
            )
        if role == "developer" and "developer" not in template:
            role = "system"
        item = {**message, "role": role}
        calls = message.get("tool_calls")
        if calls is not None:
            item["tool_calls"] = [
                _tool_call(call, f"{path}.tool_calls.{index}") for index, call in enumerate(_list(calls, f"{path}.tool_calls"))
            ]
            if not item["tool_calls"]:
                del item["tool_calls"]
        item["content"] = _content(message.get("content"), path, optional=role == "assistant" or bool(calls))
        found.append(item)
    return found


def _content(content: Any, path: str, *, optional: bool) -> str | list[dict[str, str]] | None:
    if isinstance(content, str):
        return content
    if content is None and optional:
        return None
    if not isinstance(content, list):
        raise InvalidRequestError(
            f"{path}.content must be text or a list of parts, got {'null' if content is None else type(content).__name__}",
            param=f"{path}.content",
        )
    return [_part(part, f"{path}.content.{index}") for index, part in enumerate(content)]


def _part(part: Any, path: str) -> dict[str, str]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and any(media in kind for media in _MEDIA_PARTS):
        raise NotSupportedError(
            f"{path} is of type {kind!r:.100}: only text is supported, this model has no other input", param=path, value=kind
        )
    if not isinstance(kind, str) or kind not in _TEXT_PARTS:
        raise InvalidRequestError(
            f"{path} must be a part such as {{'type': 'text', 'text': ...}}, got type {kind!r:.100}; text types: {', '.join(_TEXT_PARTS)}",
            param=path,
            value=kind,
        )
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise InvalidRequestError(
            f"{path}.{_TEXT_PARTS[kind]} must be text, got {type(text).__name__}", param=f"{path}.{_TEXT_PARTS[kind]}"
        )
    return {"type": "text", "text": text}


def _tool_call(call: Any, path: str) -> dict[str, Any]:
    """A call that the assistant made before; templates want its arguments as an object, clients send them as JSON text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"{path} must hold a function with a name", param=path)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments) if arguments.strip() else {}
        except (msgspec.DecodeError, RecursionError):
            arguments = None
    elif arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        where = f"{path}.function.arguments"
        raise InvalidRequestError(f"{where} must be a JSON object, got {function['arguments']!r:.200}", param=where)
    return {**call, "function": {**function, "arguments": arguments}}


def _list(value: Any, path: str) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidRequestError(f"{path} must be a list, got {type(value).__name__}", param=path)
    return value
