"""Messages as clients send them -> plain data that chat templates can read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxllm.errors import InvalidRequestError, NotSupportedError

# Part types that are text, and the key that holds it.
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
_REASONING = ("reasoning_content", "reasoning", "thinking")


def plain_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """A deep copy of `messages` in plain JSON types: nulls left out, tool-call arguments as objects, text parts spelt one way, and the
    reasoning under the names that templates read.

    Raises:
        InvalidRequestError: a message that is none, or tool-call arguments that are no JSON object.
        NotSupportedError: content that is not text.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidRequestError(f"messages must be a list of messages, got {type(messages).__name__}", param="messages")
    if not messages:
        raise InvalidRequestError("messages must hold at least one message", param="messages")
    return [_message(plain_value(message, f"messages[{i}]"), f"messages[{i}]") for i, message in enumerate(messages)]


def plain_tools(tools: Sequence[Any] | None) -> list[Any] | None:
    """JSON schemas of `tools`; documented Python functions are described by transformers (which this imports)."""
    if tools is None:
        return None
    return [_described(tool) if callable(tool) and not isinstance(tool, type) else plain_value(tool, "tools") for tool in tools]


def plain_value(value: Any, where: str) -> Any:
    """`value` rebuilt from plain types, so that a template meets no object with methods of its own. Raises InvalidRequestError, which
    speaks of `where`: names of what is inside would cost more than the value, since keys may be long.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain_value(item, where) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_value(item, where) for item in value]
    dump = getattr(value, "model_dump", None)
    if callable(dump):
        return plain_value(dump(), where)
    raise InvalidRequestError(f"{where} holds a {type(value).__name__}, which is no JSON value", param=where.split("[")[0])


def join_parts(content: str | list[dict[str, Any]]) -> str:
    """Text of content; several parts on lines of their own."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def to_parts(content: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidRequestError(f"{where} must be an object with role and content, got {type(message).__name__}", param="messages")
    if not isinstance(message.get("role"), str):
        raise InvalidRequestError(f"{where}.role must be a string, got {message.get('role')!r}", param="messages")
    plain = {key: value for key, value in message.items() if value is not None}
    content = plain.get("content")
    if isinstance(content, list):
        plain["content"] = [_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
    elif content is not None and not isinstance(content, str):
        raise InvalidRequestError(f"{where}.content must be a string or a list of parts, got {content!r}", param="messages")
    if plain.get("tool_calls"):
        if not isinstance(plain["tool_calls"], list):
            raise InvalidRequestError(f"{where}.tool_calls must be a list of calls, got {plain['tool_calls']!r}", param="messages")
        plain["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(plain["tool_calls"])]
    reasoning = next((plain[name] for name in _REASONING if plain.get(name)), None)
    if reasoning is not None:
        plain = {"thinking": reasoning} | plain | {"reasoning_content": reasoning}
    return plain


def _part(part: Any, where: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict):
        raise InvalidRequestError(f"{where} must be an object or a string, got {part!r}", param="messages")
    kind = part.get("type", "text" if "text" in part else None)
    if not isinstance(kind, str) or kind not in _TEXT_PARTS:
        raise NotSupportedError(f"{where} has type {kind!r}; only text is supported ({', '.join(_TEXT_PARTS)})", param="messages")
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise InvalidRequestError(f"{where}.{_TEXT_PARTS[kind]} must be a string, got {text!r}", param="messages")
    return {"type": "text", "text": text}


def _tool_call(call: Any, where: str) -> Any:
    """A tool call whose arguments are an object: clients send them as JSON text, templates print them as JSON."""
    if not isinstance(call, dict):
        raise InvalidRequestError(f"{where} must be an object, got {call!r}", param="messages")
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        arguments = {}
    elif isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"{where}.function.arguments is not valid JSON: {error}", param="messages") from error
    if not isinstance(arguments, dict):
        raise InvalidRequestError(f"{where}.function.arguments must be a JSON object, got {arguments!r}", param="messages")
    return call | {"function": function | {"arguments": arguments}}


def _described(function: Callable[..., Any]) -> Any:
    from transformers.utils import get_json_schema

    try:
        return get_json_schema(function)
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise InvalidRequestError(
            f"tools: {getattr(function, '__name__', function)!r} cannot be described: {reason}", param="tools"
        ) from error
