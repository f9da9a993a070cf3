"""Flags as data: every field of a config dataclass is one option of the command line and one key of a YAML file.

An option is named once, by its dataclass field; its type comes from the annotation, its help and default from the field. Nothing is
validated here that the dataclass validates itself: this module turns text into values of the right type.
"""

from __future__ import annotations

import dataclasses
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

_MULTIPLIERS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Option:
    """One option: `name` is the field's name, `kind` how its text is read."""

    name: str
    group: str
    kind: Literal["bool", "int", "float", "str", "json", "list"]
    default: Any
    help: str
    choices: tuple[str, ...] = ()
    alias: str | None = None

    @property
    def flag(self) -> str:
        return flag_name(self.name)

    def read(self, value: Any) -> Any:
        """A word of the command line (one item of it for a list), or a YAML value, as a value of the option's type.

        Raises:
            ValueError: it means something else.
        """
        return _READERS[self.kind](value)


def flag_name(name: str) -> str:
    return "--" + name.replace("_", "-")


def field_name(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def options_of(groups: Mapping[str, type]) -> dict[str, Option]:
    """Read the options out of config dataclasses; a field's metadata may name a group of its own."""
    found: dict[str, Option] = {}
    for group, kind in groups.items():
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            option = _option(field, hints[field.name], group)
            if option.name in found:
                raise TypeError(f"option {option.name!r} is declared twice")
            found[option.name] = option
    return found


def _option(field: dataclasses.Field[Any], hint: Any, group: str) -> Option:
    default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    kind, choices = _kind_of(hint)
    return Option(
        name=field.name,
        group=field.metadata.get("group", group),
        kind=kind,
        default=default,
        help=field.metadata.get("help", ""),
        choices=choices,
        alias=field.metadata.get("alias"),
    )


def _kind_of(hint: Any) -> tuple[Any, tuple[str, ...]]:
    """The reader for an annotation, and the values that a Literal allows."""
    arms = [arm for arm in typing.get_args(hint) if arm is not type(None)] if _is_union(hint) else [hint]
    origins = {typing.get_origin(arm) or arm for arm in arms}
    if len(arms) == 1 and Literal in origins:
        return "str", tuple(map(str, typing.get_args(arms[0])))
    for kind, types_read in _TYPES_READ:
        if origins & types_read:
            return kind, ()
    raise TypeError(f"no way to read {hint} from a command line")


# In the order of preference for unions: `str | list[str]` reads a list, `int | float` a float.
_TYPES_READ: tuple[tuple[str, set[Any]], ...] = (
    ("json", {dict, Mapping}),
    ("list", {list, tuple}),
    ("bool", {bool}),
    ("float", {float}),
    ("int", {int}),
    ("str", {str}),
)


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


# --------------------------------------------------------------------------- readers: ValueError says what is wrong


def read_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise ValueError(f"expected true or false, got {value!r}")


def read_int(value: Any) -> int:
    """An integer, or one with a unit: 8k is 8,000 and 8K is 8,192; m/M, g/G and t/T likewise."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = re.fullmatch(r"\s*(-?\d+(?:\.\d+)?)([kmgtKMGT]?)\s*", value) if isinstance(value, str) else None
    if match:
        number = float(match[1]) * _MULTIPLIERS[match[2]] if match[2] else float(match[1])
        if "." not in match[1]:
            return int(match[1]) * _MULTIPLIERS.get(match[2], 1)
        if match[2] and number.is_integer():
            return int(number)
    raise ValueError(f"expected an integer such as 4096, 8k (8000) or 8K (8192), got {value!r}")


def read_float(value: Any) -> float:
    if not isinstance(value, bool):
        try:
            return float(value)
        except (TypeError, ValueError):
            pass
    raise ValueError(f"expected a number, got {value!r}")


def read_str(value: Any) -> str:
    if isinstance(value, (dict, list)):
        raise ValueError(f"expected text, got {value!r}")
    return str(value)


def read_json(value: Any) -> Any:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(f"expected a JSON object such as '{{\"temperature\": 0.5}}', got {value!r} ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {value!r}")
    return value


def read_list(value: Any) -> tuple[str, ...]:
    return tuple(read_str(item) for item in value) if isinstance(value, (list, tuple)) else (read_str(value),)


_READERS: dict[str, Callable[[Any], Any]] = {
    "bool": read_bool,
    "int": read_int,
    "float": read_float,
    "str": read_str,
    "json": read_json,
    "list": read_list,
}
