"""Schemas at random, and whether a text fits one."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema

NAMES = ("a", "b", "name", "größe", 'quo"te', "x" * 30)

# Those that the validator knows in full; of times it does not take all.
_FORMATS = jsonschema.FormatChecker(("date", "uuid", "ipv4", "ipv6", "email"))


def random_schema(rng: random.Random, depth: int = 3) -> Any:
    """A schema of most kinds, with bounds that are sometimes contradictory or not supported."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "any"]
    kinds += ["object", "object", "array", "anyOf", "oneOf", "allOf", "not", "ref", "types"] if depth else []
    match rng.choice(kinds):
        case "string":
            more = [{}, {"maxLength": rng.randint(0, 8)}, {"minLength": 2, "maxLength": rng.randint(1, 9)}, {"pattern": "^[a-c]{1,4}$"}]
            return {"type": "string", **rng.choice([*more, {"format": rng.choice(["date", "uuid", "ipv4", "email", "unknown"])}])}
        case "integer" | "number" as kind:
            bounds = [
                {},
                {"minimum": rng.randint(-50, 50)},
                {"exclusiveMaximum": rng.randint(-5, 5)},
                {"multipleOf": rng.choice([2, 5, 0.5])},
            ]
            return {"type": kind, **rng.choice(bounds), **rng.choice(bounds)}
        case "boolean" | "null" as kind:
            return {"type": kind}
        case "enum":
            return {"enum": rng.sample([1, "1", None, True, [1], {"a": 2}, "ü", 1.5, ""], rng.randint(1, 4))}
        case "const":
            return {"const": rng.choice([0, "x", None, False, [], {"k": [1]}])}
        case "any":
            return rng.choice([{}, True, False])
        case "object":
            names = rng.sample(NAMES, rng.randint(0, 4))
            schema: dict[str, Any] = {"type": "object", "properties": {name: random_schema(rng, depth - 1) for name in names}}
            schema["required"] = rng.sample(names, rng.randint(0, len(names)))
            extra = [
                {},
                {"additionalProperties": False},
                {"additionalProperties": random_schema(rng, 0)},
                {"minProperties": 1},
                {"maxProperties": 2},
            ]
            return {**schema, **rng.choice(extra), **rng.choice([{}, {}, {"patternProperties": {"^z": {"type": "integer"}}}])}
        case "array":
            shapes = [
                {"items": random_schema(rng, depth - 1)},
                {"prefixItems": [random_schema(rng, depth - 1)], "items": False},
                {"uniqueItems": True},
            ]
            return {
                "type": "array",
                **rng.choice(shapes),
                **rng.choice([{"maxItems": 3}, {"minItems": 1, "maxItems": 2}, {"minItems": 3, "maxItems": 1}]),
            }
        case "anyOf" | "oneOf" | "allOf" as word:
            return {word: [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
        case "not":
            return {"not": random_schema(rng, 0)}
        case "ref":
            # Of its own name at each depth: one that refers to itself and nothing else is valid for no value, and validators do not end.
            return {"$ref": f"#/$defs/r{depth}", "$defs": {f"r{depth}": random_schema(rng, depth - 1)}}
        case _:
            return {"type": rng.sample(["string", "integer", "boolean", "null", "array"], 2), "maxLength": 4, "maxItems": 2}


def misfit(schema: Any, text: str) -> Exception | None:
    """Why a text is no JSON that is valid under a schema; None where it is."""
    try:
        jsonschema.Draft202012Validator(schema, format_checker=_FORMATS).validate(json.loads(text))
    except re.error:
        # An expression that is none for Python; nothing can be said.
        return None
    except Exception as error:
        return error
    return None
