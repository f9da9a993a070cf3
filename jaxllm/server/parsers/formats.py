"""What describes a format: literal markers, keys and a few patterns. The formats are in formats.toml."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from jaxllm.server.parsers.literals import JSON, Dialect

# How ids look where the model gives none: those of OpenAI, or the nine letters and digits that Mistral's templates demand.
IdStyle = Literal["openai", "mistral"]

_ANY_NAME = re.compile(r"\s*(?P<name>[^\s<>{}\[\]\"']+)\s*")


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """What all tool formats have.

    `opens` begin a section of calls anywhere in the answer, `closes` end it. Characters that may begin one without a marker are `bare`
    (at the start of the answer only) and `bare_anywhere`. `silent` words are left out of the answer wherever they stand.
    """

    name: str
    opens: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()
    bare: str = ""
    bare_anywhere: str = ""
    silent: tuple[str, ...] = ()
    # A call counts only if the request has a tool of that name: what looks like a call may be an ordinary answer.
    known_names_only: bool = False
    id_style: IdStyle = "openai"


@dataclass(frozen=True, kw_only=True)
class JsonCalls(ToolFormat):
    """A call is a JSON object with the name and the arguments; a section holds one, several, or a list."""

    names: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments", "parameters")
    # The object's id goes before ours; `id_may_follow`: it stands behind the arguments, so they wait for it.
    ids: tuple[str, ...] = ()
    id_may_follow: bool = False
    # The object's only key is the name and its value the arguments.
    name_is_key: bool = False
    # An object with other keys, or without arguments, is no call but text.
    strict: bool = False
    # What may stand between the objects of a section that is no list.
    separators: str = ""


@dataclass(frozen=True, kw_only=True)
class HeaderCalls(ToolFormat):
    """A call is a header with the name, then the arguments as one object."""

    call_opens: tuple[str, ...] = ()
    call_closes: tuple[str, ...] = ()
    # What ends the header; `header_stops` do too, and are not part of it: the arguments begin there.
    header_ends: tuple[str, ...] = ()
    header_stops: tuple[str, ...] = ()
    # Groups `name` and, where the header holds one, `id`. `written`: how a model writes it, {n} being any number.
    header: re.Pattern[str] = _ANY_NAME
    written: str = "{name}"
    dialect: Dialect = JSON
    # A section may also be a list of these, as older models of the family write it.
    listed: JsonCalls | None = None


@dataclass(frozen=True, kw_only=True)
class TaggedCalls(ToolFormat):
    """A call is a name and tagged values, whose types come from the tool's schema."""

    # A call begins with one of these; they may also begin a section by themselves.
    call_opens: tuple[str, ...]
    name_ends: tuple[str, ...]
    # Ends of the name that are read again as what follows it.
    name_stops: tuple[str, ...] = ()
    header: re.Pattern[str] = _ANY_NAME
    written: str = "{name}"
    call_closes: tuple[str, ...]
    key_open: str
    key_end: str
    # Group `key` and, where the tag tells, `type`.
    # `written_key`: how a model writes it, with {type} and {string} (true or false) where the tag tells.
    key: re.Pattern[str] = re.compile(r"\s*(?P<key>.+?)\s*", re.DOTALL)
    written_key: str = "{key}"
    value_open: str = ""
    value_close: str
    # What ends a value whose end tag is missing, and is read again.
    value_stops: tuple[str, ...] = ()
    # Values stand on lines of their own: one line break at either end is not part of them.
    value_lines: bool = False
    # A value whose type nobody tells is JSON where it can be; else it is text.
    untyped_json: bool = False
    cdata: bool = False


@dataclass(frozen=True, kw_only=True)
class PythonCalls(ToolFormat):
    """Calls are written as in Python: `[f(a=1), g(b="x")]`; `lines`: without the list, one a line."""

    lines: bool = False


@dataclass(frozen=True, kw_only=True)
class HarmonyCalls(ToolFormat):
    """OpenAI's channels (harmony.py)."""


@dataclass(frozen=True, kw_only=True)
class ReasoningFormat:
    """Where reasoning begins and ends.

    `implied`: output begins inside of reasoning unless the caller knows better (by the prompt).
    `anywhere`: reasoning may begin behind other text, and an end without a beginning is left out of the answer.
    """

    name: str
    starts: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    # What ends reasoning as well, and belongs to the answer.
    implied_ends: tuple[str, ...] = ()
    implied: bool = False
    anywhere: bool = False
    # White space around reasoning is the template's, not the model's.
    strip: bool = True
    # The answer between these two is unwrapped, where it begins with the first.
    wrapper: tuple[str, str] | None = None
    # Reasoning stays in the answer, led by this text, which the prompt had held.
    kept_with: str = ""
