"""The formats that formats.toml describes, by their names, and the words by which chat templates show them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from importlib import resources
from typing import Any, TypeVar

from jaxllm.server.parsers.formats import HarmonyCalls, HeaderCalls, JsonCalls, PythonCalls, ReasoningFormat, TaggedCalls, ToolFormat
from jaxllm.server.parsers.literals import FUNCTION_GEMMA, GEMMA4

F = TypeVar("F")
# Words that must all stand in a template -> the format; the first match counts.
Rules = list[tuple[tuple[str, ...], str]]

_KINDS = {"json": JsonCalls, "header": HeaderCalls, "tagged": TaggedCalls, "python": PythonCalls, "harmony": HarmonyCalls}
_DIALECTS = {"gemma4": GEMMA4, "functiongemma": FUNCTION_GEMMA}
_TABLES = tomllib.loads(resources.files(__package__).joinpath("formats.toml").read_text("utf-8"))


def _tool_format(*, kind: str, **fields: Any) -> ToolFormat:
    return _KINDS[kind](**fields)


def _field(name: str, value: Any) -> Any:
    if name in ("header", "key"):
        return re.compile(value)
    if name == "dialect":
        return _DIALECTS[value]
    if isinstance(value, dict):
        return JsonCalls(**{key: _field(key, part) for key, part in value.items()})
    return tuple(_field("", part) for part in value) if isinstance(value, list) else value


def _read(tables: dict[str, dict[str, Any]], make: Callable[..., F]) -> tuple[dict[str, F], Rules]:
    """Formats by their names and aliases, and how templates show them."""
    formats: dict[str, F] = {}
    rules: Rules = []
    for name, table in tables.items():
        fields = {key: _field(key, value) for key, value in table.items()}
        aliases, shown_by = fields.pop("aliases", ()), fields.pop("shown_by", None)
        if shown_by is None:
            shown_by = [(fields.get("opens") or fields.get("call_opens") or fields["starts"])[:1]]
        rules += [(words, name) for words in shown_by]
        formats |= dict.fromkeys((name, *aliases), make(name=name, **fields))
    return formats, rules


TOOL_FORMATS, TOOL_RULES = _read(_TABLES["tools"], _tool_format)
REASONING_FORMATS, REASONING_RULES = _read(_TABLES["reasoning"], ReasoningFormat)
