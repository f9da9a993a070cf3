"""What the parameters of functions ask for, as far as a grammar has to know: which arguments there are, and what their values may be."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxllm.text.lark import quoted

# Of an object whose properties are known one by one, and of a value that is any text.
_PLAIN_OBJECT = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "$id", "nullable"}
_PLAIN_VALUE = {"type", "anyOf", "oneOf", "nullable"}
_SCALARS = {"string", "number", "integer", "boolean", "null"}


class InexpressibleError(Exception):
    """The format, or a schema in it, has no grammar."""


@dataclass(frozen=True)
class Function:
    """A function that may be called. `schema`: of its arguments, an object; `strict`: all of it must be kept to."""

    name: str
    schema: dict[str, Any]
    strict: bool = True


def properties_of(function: Function) -> tuple[list[tuple[str, Any, bool]], bool]:
    """Each argument with its schema and whether it must be there; and whether there may be others of any kind.

    Raises:
        InexpressibleError: they are not described one by one.
    """
    schema = function.schema
    if schema.keys() - _PLAIN_OBJECT or schema.get("type", "object") != "object":
        raise InexpressibleError(f"the arguments of {function.name!r:.100} are not described one by one")
    properties = schema.get("properties") or {}
    more = schema.get("additionalProperties", True)
    required = schema.get("required") or []
    if more not in (True, False, {}) or not isinstance(required, list) or not all(name in list(properties) for name in required):
        raise InexpressibleError(f"the arguments of {function.name!r:.100} are not described one by one")
    definitions = definitions_of(schema)
    known = []
    for key, value in properties.items():
        if _refers_elsewhere(value) or not isinstance(value, dict):
            raise InexpressibleError(f"the argument {key!r:.100} of {function.name!r:.100} is not described by itself")
        found = {**value, **definitions}
        known.append((key, referred(found) if value.keys() == {"$ref"} else found, key in required))
    return known, more is not False


def definitions_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """What references in a part of the schema may name."""
    return {name: schema[name] for name in ("$defs", "definitions") if name in schema}


def referred(schema: Mapping[str, Any]) -> dict[str, Any]:
    """What the schema's `$ref` names, with the definitions. Raises InexpressibleError where nothing is there, or no object."""
    _, table, name = schema["$ref"].split("/", 2)
    found = schema.get(table, {}).get(name)
    if not isinstance(found, dict):
        raise InexpressibleError(f"$ref {schema['$ref']!r:.100} leads to no schema")
    return {**found, **definitions_of(schema)}


def _refers_elsewhere(schema: Any) -> bool:
    if isinstance(schema, list):
        return any(map(_refers_elsewhere, schema))
    if not isinstance(schema, dict):
        return False
    reference = schema.get("$ref")
    return (isinstance(reference, str) and not reference.startswith(("#/$defs/", "#/definitions/"))) or any(
        map(_refers_elsewhere, schema.values())
    )


def literals_of(schema: Mapping[str, Any]) -> list[str] | None:
    """The texts of a value that is one of a few; None for any other."""
    texts: list[str] = []
    for branch in schema.get("anyOf") or [schema]:
        found = branch if isinstance(branch, Mapping) else {}
        found = referred({**found, **definitions_of(schema)}) if "$ref" in found else found
        values = [None] if found.get("type") == "null" else [found["const"]] if "const" in found else found.get("enum")
        if not isinstance(values, list) or not values or not all(value is None or isinstance(value, str | int | float) for value in values):
            return None
        texts += [quoted(value if isinstance(value, str) else json.dumps(value)) for value in values if value != ""]
    return texts or None


def is_any_text(schema: Any, types: frozenset[str] | None) -> bool:
    """Whether a value may be any text, since whatever its type, it has no other bounds."""
    return not (types or set()) - _SCALARS and _is_unbounded(schema)


def _is_unbounded(schema: Any) -> bool:
    if not isinstance(schema, Mapping):
        return False
    branches = [*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]
    return not schema.keys() - _PLAIN_VALUE - {"$defs", "definitions"} and all(map(_is_unbounded, branches))


def first_type(types: frozenset[str] | None) -> str:
    """One of the types, as tags name them."""
    return "number" if types == {"integer"} else min(types or {"string"})
