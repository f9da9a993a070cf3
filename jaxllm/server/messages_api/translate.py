"""From a request of the Messages API to one of chat completions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from jaxllm.errors import InvalidRequestError, NotSupportedError
from jaxllm.server.answering import translated
from jaxllm.server.conversation import Message, with_instructions
from jaxllm.server.messages_api.protocol import CountTokensRequest, MessagesRequest
from jaxllm.server.protocol import ChatCompletionRequest

# Fields of chat completions, as errors name them, and what they are called here.
FIELD_NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
}
# The first system block of one client says something else in every request: nothing of the prompt would be found in the cache.
_CHANGING_BLOCK = "x-anthropic-billing-header"
# The same client has names of its own for what it adds to a conversation.
_USER_ROLES = ("user", "ctx", "msg")


def chat_request(body: CountTokensRequest) -> ChatCompletionRequest:
    """The chat request that makes the answer. Sampling fields that chat knows pass through as they are.

    Raises:
        InvalidRequestError, pydantic.ValidationError: a block, a tool or a passed field is at fault.
    """
    messages = _with_one_system(list(_messages(body)))
    fields: dict[str, Any] = {
        **(body.model_extra or {}),
        "model": body.model,
        "messages": messages,
        "tools": [_tool(tool, f"tools[{number}]") for number, tool in enumerate(body.tools or ())] or None,
        **_tool_choice(body.tool_choice),
        **_output(body),
        **_thinking(body, (body.model_extra or {}).get("chat_template_kwargs")),
    }
    last = messages[-1]
    if last["role"] == "assistant" and last.get("content") and "tool_calls" not in last:
        # The answer goes on where the client began it.
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    if isinstance(body, MessagesRequest):
        fields |= {name: getattr(body, name) for name in ("max_tokens", "stream", "temperature", "top_p", "top_k")}
        fields["stop"] = body.stop_sequences
    return translated(fields, FIELD_NAMES)


# ------------------------------------------------------------------------------------------------------------------- messages


def _messages(body: CountTokensRequest) -> Iterator[Message]:
    system = _system(body.system)
    if system:
        yield {"role": "system", "content": system}
    names: dict[str, str] = {}
    for number, message in enumerate(body.messages):
        where, role, content = f"messages[{number}]", message.get("role"), message.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
            raise InvalidRequestError(f"{where}.content must be text or a list of blocks", param="messages")
        if role in _USER_ROLES:
            yield from _user_messages(blocks, where, names)
        elif role == "assistant":
            yield _assistant_message(blocks, where, names)
        elif role == "system":
            yield {"role": "system", "content": _texts(blocks, f"{where}.content")}
        else:
            raise InvalidRequestError(f"{where}.role must be user or assistant, got {role!r:.200}", param="messages")


def _with_one_system(messages: list[Message]) -> list[Message]:
    """The conversation as templates want it: one system message, at the front, and no two messages of the user in a row. What the system
    says later becomes part of what the user or a tool says.
    """
    found: list[Message] = []
    for message in with_instructions(None, messages):
        added = bool(found) and message["role"] in ("user", "system")
        if added and (found[-1]["role"] == "user" or (found[-1]["role"] == "tool" and message["role"] == "system")):
            found[-1]["content"] += "\n\n" + message["content"]
        else:
            found.append({**message, "role": "user"} if added else message)
    return found


def _system(system: Any) -> str:
    if system is None or isinstance(system, str):
        return system or ""
    if not isinstance(system, list) or not all(isinstance(block, dict) for block in system):
        raise InvalidRequestError("system must be text or a list of text blocks", param="system")
    texts = [_text(block, f"system[{number}]", "system") for number, block in enumerate(system)]
    return "\n".join(text for text in texts if not text.startswith(_CHANGING_BLOCK))


def _user_messages(blocks: list[dict[str, Any]], where: str, names: Mapping[str, str]) -> Iterator[Message]:
    """Results of tools are messages of their own, before what the user says."""
    said = []
    for number, block in enumerate(blocks):
        place = f"{where}.content[{number}]"
        if block.get("type") != "tool_result":
            said.append(_text(block, place, "messages"))
            continue
        call_id, content = block.get("tool_use_id"), block.get("content")
        if not isinstance(call_id, str):
            raise InvalidRequestError(f"{place}.tool_use_id must be text, got {call_id!r:.200}", param="messages")
        if isinstance(content, list) and all(isinstance(part, dict) for part in content):
            content = _texts(content, f"{place}.content")
        if content is not None and not isinstance(content, str):
            raise InvalidRequestError(f"{place}.content must be text or a list of text blocks", param="messages")
        result: Message = {"role": "tool", "tool_call_id": call_id, "content": content or ""}
        if call_id in names:
            result["name"] = names[call_id]
        yield result
    if said or not blocks:
        yield {"role": "user", "content": "\n".join(said)}


def _assistant_message(blocks: list[dict[str, Any]], where: str, names: dict[str, str]) -> Message:
    said, thought, calls = [], [], []
    for number, block in enumerate(blocks):
        place = f"{where}.content[{number}]"
        match block.get("type"):
            case "tool_use":
                call_id, name, arguments = block.get("id"), block.get("name"), block.get("input")
                if not (isinstance(call_id, str) and isinstance(name, str) and isinstance(arguments, dict)):
                    raise InvalidRequestError(f"{place} must have an id, a name and an object as input", param="messages")
                names[call_id] = name
                function = {"name": name, "arguments": msgspec.json.encode(arguments).decode()}
                calls.append({"id": call_id, "type": "function", "function": function})
            case "thinking":
                if not isinstance(block.get("thinking"), str):
                    raise InvalidRequestError(f"{place}.thinking must be text", param="messages")
                thought.append(block["thinking"])
            case "redacted_thinking":
                # Only who made it can read it.
                pass
            case _:
                said.append(_text(block, place, "messages"))
    message: Message = {"role": "assistant", "content": "\n".join(said) if said else None}
    if thought:
        # Templates of different families read different names.
        message["reasoning"] = message["reasoning_content"] = "\n".join(thought)
    if calls:
        message["tool_calls"] = calls
    return message


def _texts(blocks: list[dict[str, Any]], where: str) -> str:
    return "\n".join(_text(block, f"{where}[{number}]", "messages") for number, block in enumerate(blocks))


def _text(block: dict[str, Any], where: str, param: str) -> str:
    """What a block says; of a tool that was found its name, since every tool is shown from the start."""
    key = {"text": "text", "tool_reference": "tool_name"}.get(str(block.get("type")))
    if key is None:
        raise NotSupportedError(f"{where}.type must be text here; got {block.get('type')!r:.200}", param=param)
    if not isinstance(block.get(key), str):
        raise InvalidRequestError(f"{where}.{key} must be text", param=param)
    return block[key]


# -------------------------------------------------------------------------------------------------------------------- options


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom":
        raise NotSupportedError(f"{where}.type must be 'custom': tools run at the client; got {tool['type']!r:.200}", param="tools")
    function = {name: tool[name] for name in ("name", "description", "strict") if tool.get(name) is not None}
    if not isinstance(tool.get("input_schema"), dict):
        raise InvalidRequestError(f"{where}.input_schema must be a JSON schema", param="tools")
    return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}


def _tool_choice(choice: Mapping[str, Any] | None) -> dict[str, Any]:
    if choice is None:
        return {}
    fields: dict[str, Any] = {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {}
    match choice.get("type"):
        case "auto" | "none" as kind:
            return {**fields, "tool_choice": kind}
        case "any":
            return {**fields, "tool_choice": "required"}
        case "tool" if isinstance(choice.get("name"), str):
            return {**fields, "tool_choice": {"type": "function", "function": {"name": choice["name"]}}}
    raise InvalidRequestError(f"tool_choice.type must be auto, any, none or tool (with a name); got {choice!r:.200}", param="tool_choice")


def _output(body: CountTokensRequest) -> dict[str, Any]:
    config = body.output_config or {}
    fields: dict[str, Any] = {}
    if config.get("effort") is not None:
        fields["reasoning_effort"] = config["effort"]
    wanted = config.get("format") or body.output_format
    if wanted is not None:
        if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
            raise NotSupportedError(f"output_config.format.type must be json_schema, got {wanted!r:.200}", param="output_config.format")
        fields["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "output", "schema": wanted.get("schema"), "strict": True},
        }
    return fields


def _thinking(body: CountTokensRequest, template_kwargs: Any) -> dict[str, Any]:
    """Whether the template lets the model think, and for how long. Unasked, it does what it does."""
    if body.thinking is None:
        return {}
    thinks = body.thinking.type != "disabled"
    given = template_kwargs if isinstance(template_kwargs, dict) else {}
    # Templates of different families read different names.
    fields: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": thinks, "thinking": thinks, **given}}
    if body.thinking.type == "enabled" and isinstance(body, MessagesRequest):
        fields["thinking_token_budget"] = body.thinking.budget_tokens
    return fields
