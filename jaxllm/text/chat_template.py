"""Chats to prompts: a model's Jinja chat template, rendered in a sandbox with the variables and helpers that transformers defines."""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxllm.errors import ConfigError, InvalidRequestError
from jaxllm.text.chat_messages import join_parts, plain_messages, plain_tools, plain_value, to_parts

if TYPE_CHECKING:
    import jinja2

CONTENT_FORMATS = ("auto", "string", "openai")
_RESERVED = (
    *("messages", "tools", "documents", "add_generation_prompt"),
    *("continue_final_message", "chat_template", "content_format", "tokenize", "self"),
)
# Ends with a space, so that a template that trims the message shows it.
_MARK = "\u2063jaxllm-continues-here\u2063 "
_PROBE = "jaxllm-probe"


class ChatTemplates:
    """The chat templates of one tokenizer, by name: "default", and with some models "tool_use", "rag" and others.

    `special_tokens` are the tokenizer's, by their roles.
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]):
        self.templates = dict(templates)
        self._special_tokens = special_tokens

    @property
    def default(self) -> str | None:
        return self.templates.get("default")

    def check(self) -> None:
        """Compile every template, to find mistakes at start instead of at the first request. Raises ConfigError."""
        import jinja2

        for name, template in self.templates.items():
            try:
                _compiled(template)
            except jinja2.TemplateError as error:
                raise ConfigError(f"the {name} chat template does not compile: {error}") from error

    def select(self, chosen: str | None, has_tools: bool) -> str:
        """The template to use: the given text or name, else "tool_use" for chats with tools where there is one, else the default."""
        if chosen is not None:
            template = self.templates.get(chosen, chosen)
            if template == chosen and not any(mark in chosen for mark in ("{{", "{%", "{#")):
                raise InvalidRequestError(
                    f"chat_template={chosen!r} is neither a Jinja template nor the name of one of this model's ({self._names()})",
                    param="chat_template",
                )
            return template
        if has_tools and "tool_use" in self.templates:
            return self.templates["tool_use"]
        if self.default is None:
            known = f"; it has templates named {self._names()}: choose one" if self.templates else ""
            raise InvalidRequestError(
                f"this model has no default chat template{known}; give one with chat_template, or send a plain prompt"
            )
        return self.default

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        content_format: str = "auto",
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a chat. It holds the special tokens that the template wants: encode it with add_special_tokens=False.

        Args:
            messages: role, content (text or a list of parts) and what else the template reads, oldest first.
            tools: JSON schemas or documented Python functions.
            add_generation_prompt: end with the header of the assistant's turn.
            continue_final_message: leave the last message open, for the model to go on with it.
            chat_template: a template to use instead of the model's, or the name of one of the model's.
            content_format: "string" or "openai" (a list of parts): what the template reads; "auto" looks at the template.
            variables: further variables of the template.

        Raises:
            InvalidRequestError: there is no template, or it refuses the chat; the message is the template's.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt exclude each other; set add_generation_prompt to false",
                param="continue_final_message",
            )
        if content_format not in CONTENT_FORMATS:
            raise InvalidRequestError(f"the content format must be one of {', '.join(CONTENT_FORMATS)}, got {content_format!r}")
        for name in _RESERVED:
            if name in (variables or {}):
                raise InvalidRequestError(
                    f"chat_template_kwargs may not set {name!r}: it has a field of its own", param="chat_template_kwargs"
                )
        template = self.select(chat_template, has_tools=bool(tools))
        chat = [_formatted(_known_role(message, template), template, content_format) for message in plain_messages(messages)]
        if continue_final_message:
            _mark_end(chat)
        context = {
            **self._special_tokens,
            **plain_value(variables or {}, "chat_template_kwargs"),
            "messages": chat,
            "tools": plain_tools(tools),
            "documents": plain_value(documents, "documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            prompt = _rendered(template, context)
        except InvalidRequestError:
            # Some templates want text of the assistant where it only called tools; some tell those turns by their having none.
            spoken = [message | {"content": message.get("content", "")} for message in chat]
            if spoken == chat:
                raise
            prompt = _rendered(template, context | {"messages": spoken})
        return _cut_at_mark(prompt) if continue_final_message else prompt

    def _names(self) -> str:
        return ", ".join(self.templates) or "none"


def _known_role(message: dict[str, Any], template: str) -> dict[str, Any]:
    """OpenAI's clients send `developer` where they sent `system`; most templates know only the latter."""
    if message["role"] == "developer" and "developer" not in template:
        return message | {"role": "system"}
    return message


def _formatted(message: dict[str, Any], template: str, content_format: str) -> dict[str, Any]:
    """`message` with its content as the template reads it: text, or a list of parts."""
    content = message.get("content")
    if content is None:
        return message
    if content_format == "auto":
        takes_text, takes_parts = _accepts(template, message["role"] if message["role"] in _PROBE_CHATS else "user")
        if isinstance(content, str):
            wants_parts = takes_parts and not takes_text
        else:
            wants_parts = takes_parts
    else:
        wants_parts = content_format == "openai"
    if wants_parts:
        return message if isinstance(content, list) else message | {"content": to_parts(content)}
    return message | {"content": join_parts(content)}


_CALL = {"id": "call12345", "type": "function", "function": {"name": "f", "arguments": {}}}
# A chat that ends with a message of the role in question, to see what a template does with its content.
_PROBE_CHATS: dict[str, list[dict[str, Any]]] = {
    "user": [{"role": "user"}],
    "system": [{"role": "system"}, {"role": "user", "content": "x"}],
    "assistant": [{"role": "user", "content": "x"}, {"role": "assistant"}],
    "tool": [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "call12345", "name": "f"},
    ],
}


@functools.lru_cache(maxsize=256)
def _accepts(template: str, role: str) -> tuple[bool, bool]:
    """Whether the template renders the content of `role` when it is text, and when it is a list of parts.

    It is tried out: what a template's code looks like says little about what reaches the prompt.
    """

    def prompt_with(content: Any) -> str:
        chat = [message | ({"content": content} if message["role"] == role else {}) for message in _PROBE_CHATS[role]]
        context = {"messages": chat, "tools": None, "documents": None, "add_generation_prompt": False, "bos_token": "", "eos_token": ""}
        try:
            return _rendered(template, context)
        except InvalidRequestError:
            return ""

    with_parts = prompt_with(to_parts(_PROBE))
    only_printed = any(f"{q}text{q}:{gap}{q}{_PROBE}{q}" in with_parts for q in "'\"" for gap in ("", " "))
    return _PROBE in prompt_with(_PROBE), _PROBE in with_parts and not only_printed


def _mark_end(chat: list[dict[str, Any]]) -> None:
    """Put the mark behind the text of the last message, in place."""
    content = chat[-1].get("content") if chat else None
    if isinstance(content, str):
        chat[-1] = chat[-1] | {"content": content + _MARK}
        return
    parts = list(content or ())
    for i in reversed(range(len(parts))):
        if "text" in parts[i]:
            parts[i] = parts[i] | {"text": parts[i]["text"] + _MARK}
            chat[-1] = chat[-1] | {"content": parts}
            return
    raise InvalidRequestError("continue_final_message needs a last message with text to continue", param="continue_final_message")


def _cut_at_mark(prompt: str) -> str:
    at = prompt.rfind(_MARK.rstrip())
    if at < 0:
        raise InvalidRequestError(
            "continue_final_message: the chat template leaves the last message out of the prompt, so it cannot be continued",
            param="continue_final_message",
        )
    kept = prompt[:at]
    return kept if prompt.startswith(_MARK, at) else kept.rstrip()


def _rendered(template: str, context: Mapping[str, Any]) -> str:
    import jinja2

    try:
        prompt = _compiled(template).render(context)
        # Escapes in arguments of calls, and in templates, may spell lone surrogates, which are no text.
        prompt.encode()
        return prompt
    except jinja2.TemplateSyntaxError as error:
        raise InvalidRequestError(f"the chat template does not compile: {error}", param="chat_template") from error
    except (jinja2.TemplateError, jinja2.sandbox.SecurityError) as error:
        raise InvalidRequestError(f"the chat template refuses these messages: {error}", param="messages") from error
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError) as error:
        raise InvalidRequestError(f"the chat template cannot render these messages: {error}", param="messages") from error


@functools.lru_cache(maxsize=64)
def _compiled(template: str) -> jinja2.Template:
    return _environment().from_string(template)


@functools.cache
def _environment() -> jinja2.Environment:
    """The environment that chat templates are written for."""
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

    class GenerationBlock(jinja2.ext.Extension):
        """`{% generation %}` marks what the assistant said, for training; here its body is rendered as it is."""

        tags = {"generation"}  # noqa: RUF012 (Extension declares it so)

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: now().strftime(format)
    return environment


def now() -> datetime.datetime:
    """The local time that templates see."""
    return datetime.datetime.now()
