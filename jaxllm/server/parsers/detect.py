"""Which formats a model writes, told by its chat template; and whether a prompt leaves reasoning open."""

from __future__ import annotations

from jaxllm.server.parsers.formats import ReasoningFormat
from jaxllm.server.parsers.tables import REASONING_RULES, TOOL_RULES, Rules


def tool_format_of(template: str) -> str | None:
    """Name of the format in which a model with this chat template calls tools; None where the template has none that we know."""
    return _first(TOOL_RULES, template)


def reasoning_format_of(template: str) -> str | None:
    """Name of the format in which a model with this chat template reasons; None where it does not."""
    return _first(REASONING_RULES, template)


def _first(rules: Rules, template: str) -> str | None:
    return next((name for words, name in rules if all(word in template for word in words)), None)


def opens_reasoning(prompt: str, form: ReasoningFormat, *, continues: bool) -> bool:
    """Whether the output begins inside of reasoning that the prompt opened.

    Args:
        continues: the prompt ends inside of a message of the assistant, so text may stand between the opening and its end.
    """
    end = max((prompt.rfind(word) for word in form.ends), default=-1)
    for word in form.starts:
        start = prompt.rfind(word)
        if start > end and (continues or not prompt[start + len(word) :].strip()):
            return True
    return False
