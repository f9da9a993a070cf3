"""How the served model writes tool calls and reasoning: settled once, from the server's options and the model's chat template."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxllm.errors import ConfigError
from jaxllm.server.parsers import REASONING_FORMATS, TOOL_FORMATS, ReasoningFormat, ToolFormat, reasoning_format_of, tool_format_of

if TYPE_CHECKING:
    from jaxllm.server.config import ServerConfig
    from jaxllm.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

AUTO = "auto"
HARMONY_CALLS, HARMONY_REASONING = TOOL_FORMATS["openai"], REASONING_FORMATS["openai_gptoss"]


@dataclass(frozen=True)
class OutputFormats:
    """The formats to parse, None for those that are left in the answer.

    `special_tools`, `special_reasoning`: markers of the format are special tokens, which its text must hold. `special_ids`: of all special
    tokens by their text.
    """

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    special_tools: bool = False
    special_reasoning: bool = False
    special_ids: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def are_harmony(self) -> bool:
        return self.reasoning is HARMONY_REASONING


def settle_formats(config: ServerConfig, tokenizer: Tokenizer) -> OutputFormats:
    """Raises ConfigError where "auto" is asked of a template that shows no tool calls, or formats exclude each other."""
    template = "\n".join(tokenizer.chat_templates.values())
    tools = _tool_format(config.tool_call_parser, template)
    reasoning = _reasoning_format(config.reasoning_parser, template)
    if tools is HARMONY_CALLS and reasoning not in (None, HARMONY_REASONING):
        raise ConfigError(f"reasoning_parser={config.reasoning_parser!r}: calls as openai writes them come with reasoning as openai_gptoss")
    if tools is HARMONY_CALLS:
        # Its channels cannot be told apart by halves.
        reasoning = HARMONY_REASONING
    special = {tokenizer.added_tokens[token_id]: token_id for token_id in tokenizer.all_special_ids}
    return OutputFormats(tools, reasoning, _holds(tools, special), _holds(reasoning, special), special)


def _tool_format(name: str | None, template: str) -> ToolFormat | None:
    if name is None:
        return None
    if name == AUTO:
        name = tool_format_of(template)
        if name is None:
            raise ConfigError(
                "tool_call_parser='auto': the model's chat template shows no tool calls that we know; name a parser, or leave it out"
            )
        logger.info("tool calls are read as %s, told by the chat template", name)
    return TOOL_FORMATS[name]


def _reasoning_format(name: str | None, template: str) -> ReasoningFormat | None:
    if name is None:
        return None
    if name == AUTO:
        name = reasoning_format_of(template)
        if name is None:
            logger.info("no reasoning is read: the chat template shows none that we know")
            return None
        logger.info("reasoning is read as %s, told by the chat template", name)
    return REASONING_FORMATS[name]


def _holds(form: ToolFormat | ReasoningFormat | None, special: Iterable[str]) -> bool:
    """Whether a special token stands in one of the format's markers."""
    if form is None:
        return False
    if form in (HARMONY_CALLS, HARMONY_REASONING):
        return True
    words: list[str] = []
    for field in dataclasses.fields(form):
        value = getattr(form, field.name)
        if isinstance(value, tuple):
            words += value
        elif isinstance(value, str) and field.name != "name":
            words.append(value)
        elif isinstance(value, re.Pattern):
            words.append(value.pattern.replace("\\", ""))
    return any(token and token in word for token in special for word in words)
