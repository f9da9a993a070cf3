"""Conversations: what the server checks of them before the model's template renders them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxllm.errors import InvalidRequestError
from jaxllm.server.protocol import TemplateRequest

if TYPE_CHECKING:
    from jaxllm.text.tokenizer import Tokenizer


def render_chat(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], request: TemplateRequest, *, trust_template: bool) -> str:
    """The prompt of a conversation.

    Raises:
        InvalidRequestError: a message that is none, options that exclude each other, an untrusted template, or one that refuses
            the conversation.
    """
    if request.chat_template is not None and not trust_template:
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
    return tokenizer.apply_chat_template(
        messages,
        request.tools,
        add_generation_prompt=not continues if request.add_generation_prompt is None else request.add_generation_prompt,
        continue_final_message=continues,
        chat_template=request.chat_template,
        documents=request.documents,
        variables=variables,
    )


def _check_content(messages: Sequence[Mapping[str, Any]]) -> None:
    """Only the assistant may say nothing, where it called tools or is to be continued; templates would print "None" for others."""
    for number, message in enumerate(messages):
        if message.get("content") is None and message.get("role") != "assistant":
            where = f"messages[{number}].content"
            raise InvalidRequestError(f"{where} must be text or a list of text parts, got null", param="messages")
