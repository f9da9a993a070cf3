"""Types of arguments by a tool's JSON schema, for formats that write every value as text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from jaxllm.server.parsers.json_writer import encoded
from jaxllm.server.parsers.literals import PYTHON, json_of

_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_ALL = frozenset(("string", "integer", "number", "boolean", "null", "object", "array"))
_MAX_NESTING = 8
_ALIASES = {"str": "string", "text": "string", "int": "integer", "float": "number", "bool": "boolean", "dict": "object", "list": "array"}


def function_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The function of a tool, nested as in chat completions or flat as in other APIs."""
    function = tool.get("function", tool)
    return function if isinstance(function, Mapping) else {}


class ToolSchemas:
    """What a request's tools say about arguments."""

    def __init__(self, tools: Iterable[Mapping[str, Any]] | None):
        self.given = tools is not None
        self._schemas: dict[str, Mapping[str, Any]] = {}
        for tool in tools or ():
            function = function_of(tool)
            name = function.get("name")
            if isinstance(name, str):
                schema = function.get("parameters") or function.get("input_schema")
                self._schemas[name] = schema if isinstance(schema, Mapping) else {}

    def __contains__(self, name: str) -> bool:
        return name in self._schemas

    def types(self, tool: str, key: str) -> frozenset[str] | None:
        """JSON types that an argument may have; None where nothing tells."""
        root = self._schemas.get(tool, {})
        properties = root.get("properties")
        schema = properties.get(key) if isinstance(properties, Mapping) else root.get("additionalProperties")
        return _types(schema, root, 0)


def _types(schema: Any, root: Mapping[str, Any], nesting: int) -> frozenset[str] | None:
    if not isinstance(schema, Mapping) or nesting > _MAX_NESTING:
        return None
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: Any = root
        for part in reference[2:].split("/"):
            target = target.get(part) if isinstance(target, Mapping) else None
        return _types(target, root, nesting + 1)
    given = schema.get("type")
    names = [given] if isinstance(given, str) else given if isinstance(given, list) else []
    types = {_ALIASES.get(name, name) for name in names if isinstance(name, str)}
    if "enum" in schema and not types and isinstance(schema["enum"], list):
        types = {_type_of(value) for value in schema["enum"]}
    if "const" in schema and not types:
        types = {_type_of(schema["const"])}
    for word in ("anyOf", "oneOf", "allOf"):
        for branch in schema.get(word) or () if isinstance(schema.get(word), list) else ():
            types |= _types(branch, root, nesting + 1) or frozenset()
    if not types and "properties" in schema:
        types = {"object"}
    if not types and "items" in schema:
        types = {"array"}
    if schema.get("nullable") is True and types:
        types.add("null")
    return frozenset(types & _ALL) or None


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    for kind, name in ((str, "string"), (int, "integer"), (float, "number"), (list, "array"), (Mapping, "object")):
        if isinstance(value, kind):
            return name
    return "null"


def typed_json(text: str, types: frozenset[str] | None) -> str:
    """JSON of a value written as text: of the first allowed type that it can be, else a string."""
    bare = text.strip()
    types = _ALL if types is None else types
    lowered = bare.lower()
    if "null" in types and lowered in ("null", "none"):
        return "null"
    if "boolean" in types and lowered in ("true", "false"):
        return lowered
    if ("number" in types or "integer" in types) and _NUMBER.fullmatch(bare):
        if "number" in types or bare.lstrip("-").isdigit():
            return bare
        if "." in bare and not bare.partition(".")[2].strip("0"):
            return bare.partition(".")[0]
    container = "object" if bare[:1] == "{" else "array" if bare[:1] == "[" else None
    if container in types:
        value = json_of(bare, PYTHON)
        if value is not None:
            return value
    if "string" not in types and bare[:1] == '"':
        # A value that was quoted although its type is no string.
        try:
            return typed_json(str(json.loads(bare)), types)
        except (ValueError, RecursionError):
            pass
    return encoded(text)
