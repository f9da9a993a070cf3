"""Items of the Responses API as messages of a conversation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxllm.errors import InvalidRequestError, NotSupportedError
from jaxllm.server.conversation import Message

_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "text")


def messages_of(given: Any) -> list[Message]:
    """The messages of `input`: text, or a list of items.

    What one turn of the model left as several items (reasoning, text, calls) becomes one message again, as templates want it.

    Raises:
        InvalidRequestError: something that is no item, or an item that only OpenAI's own tools make.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        shown = "an empty list" if given == [] else type(given).__name__
        raise InvalidRequestError(f"input must be text or a list of items, not empty; got {shown}", param="input")
    conversation = _Conversation()
    for number, item in enumerate(given):
        conversation.add(item, f"input[{number}]")
    return conversation.messages


class _Conversation:
    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._names: dict[str, str] = {}

    def add(self, item: Any, where: str) -> None:
        if not isinstance(item, dict):
            raise InvalidRequestError(f"{where} must be an object, got {type(item).__name__}", param="input")
        kind = item.get("type") or ("message" if "role" in item else None)
        match kind:
            case "message":
                self._message(item, where)
            case "function_call":
                self._call(item, where)
            case "function_call_output":
                self._output(item, where)
            case "reasoning":
                self._reasoning(item, where)
            case _:
                raise NotSupportedError(
                    f"{where}.type must be message, function_call, function_call_output or reasoning; got {kind!r:.200}", param="input"
                )

    def _assistant(self, *, without: str | None = None) -> Message:
        """The model's turn that an item belongs to: the last message, or a new one where that already has a value of this name."""
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != "assistant" or (without is not None and last.get(without)):
            last = {"role": "assistant", "content": None}
            self.messages.append(last)
        return last

    def _message(self, item: Mapping[str, Any], where: str) -> None:
        role = item.get("role")
        if role not in _ROLES:
            raise InvalidRequestError(f"{where}.role must be one of {', '.join(_ROLES)}; got {role!r:.200}", param="input")
        content = text_content(item.get("content"), f"{where}.content")
        if role == "assistant":
            self._assistant(without="content")["content"] = content
        else:
            self.messages.append({"role": role, "content": content})

    def _call(self, item: Mapping[str, Any], where: str) -> None:
        call_id, name, arguments = (_text(item, key, where) for key in ("call_id", "name", "arguments"))
        self._names[call_id] = name
        calls = self._assistant().setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})

    def _output(self, item: Mapping[str, Any], where: str) -> None:
        call_id = _text(item, "call_id", where)
        message: Message = {"role": "tool", "tool_call_id": call_id, "content": text_content(item.get("output"), f"{where}.output")}
        if call_id in self._names:
            message["name"] = self._names[call_id]
        self.messages.append(message)

    def _reasoning(self, item: Mapping[str, Any], where: str) -> None:
        parts = item.get("content") or item.get("summary") or []
        if not isinstance(parts, list) or not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
            raise InvalidRequestError(f"{where}.content must be a list of parts with text", param="input")
        text = "\n".join(part["text"] for part in parts)
        if not text:
            return
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != "assistant" or last["content"] is not None or "tool_calls" in last:
            # Reasoning comes first in a turn.
            self.messages.append({"role": "assistant", "content": None})
        message = self.messages[-1]
        # Templates of different families read different names.
        message["reasoning"] = message["reasoning_content"] = "\n".join(filter(None, (message.get("reasoning"), text)))


def text_content(content: Any, where: str) -> str | list[dict[str, str]]:
    """Content of a message for the template: text, or several parts of text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(f"{where} must be text or a list of parts, got {type(content).__name__}", param="input")
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if kind not in (*_TEXT_PARTS, "refusal"):
            raise NotSupportedError(f"{where}[{number}].type must be input_text or output_text; got {kind!r:.200}", param="input")
        if not isinstance(text, str):
            raise InvalidRequestError(f"{where}[{number}] must hold text", param="input")
        texts.append(text)
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


def _text(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidRequestError(f"{where}.{name} must be text, got {value!r:.200}", param="input")
    return value
