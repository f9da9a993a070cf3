"""Random schemas, valid and not: each is refused, or whatever its mask lets through validates."""

from __future__ import annotations

import contextlib
import json
import random
from typing import Any

import jsonschema
import pytest

from jaxllm.errors import InvalidRequestError
from tests.text.test_grammar import EOS, TOKENIZER, allowed, matcher_of

MAX_STEPS = 300
WORDS = ["a", "name", "é", "x y", '"', "\\", "", "0"]


def random_schema(rng: random.Random, depth: int = 0) -> Any:
    """Mostly sensible, sometimes absurd."""
    if rng.random() < 0.03:
        return rng.choice([True, False, 5, "text", None, [], {"type": "nonsense"}, {"type": 7}, {"$ref": "#/nowhere"}, {"enum": []}])
    schema: dict[str, Any] = {}
    kinds = ["object", "array", "string", "integer", "number", "boolean", "null"]
    kind = rng.choice(kinds[2:] if depth > 2 else kinds)
    if rng.random() < 0.9:
        schema["type"] = rng.choice([kind, kind, [kind, "null"]])
    sub = lambda: random_schema(rng, depth + 1)
    low, high = sorted(rng.choices(range(-3, 12), k=2))
    if kind == "object":
        names = rng.sample(WORDS, rng.randrange(4))
        schema["properties"] = {name: sub() for name in names}
        schema["required"] = rng.sample([*names, "b"], rng.randrange(len(names) + 1))
        schema["additionalProperties"] = rng.choice([False, False, True, {"type": "integer"}])
    extras: dict[str, list[Any]] = {
        "array": [("items", sub), ("minItems", lambda: low), ("maxItems", lambda: high), ("prefixItems", lambda: [sub()]),
                  ("uniqueItems", lambda: True), ("contains", sub)],
        "string": [("minLength", lambda: low), ("maxLength", lambda: high), ("pattern", lambda: rng.choice(["^a+$", "b", "(", r"\\d{2}"])),
                   ("format", lambda: rng.choice(["date", "uuid", "email", "nonsense"])), ("enum", lambda: rng.sample(WORDS, 3))],
        "integer": [("minimum", lambda: low), ("maximum", lambda: high), ("multipleOf", lambda: rng.choice([2, 7, 0.1])),
                    ("exclusiveMinimum", lambda: low)],
        "number": [("minimum", lambda: low), ("maximum", lambda: high + 0.5), ("multipleOf", lambda: 0.5)],
        "object": [("minProperties", lambda: low), ("maxProperties", lambda: high), ("patternProperties", lambda: {"^x": sub()}),
                   ("propertyNames", sub), ("dependentRequired", lambda: {"a": ["name"]})],
    }  # fmt: skip
    for name, make in extras.get(kind, []):
        if rng.random() < 0.25:
            schema[name] = make()
    if depth < 2 and rng.random() < 0.2:
        schema[rng.choice(["anyOf", "allOf", "oneOf"])] = [sub() for _ in range(rng.randrange(1, 3))]
    if rng.random() < 0.05:
        schema[rng.choice(["const", "if", "not", "$ref", "x-guidance", "unknownKeyword"])] = rng.choice([{}, 1, {"lenient": True}, "#"])
    return schema


def is_schema(schema: Any) -> bool:
    """Nonsense may hide where no output can reach it, and the validator trips over it."""
    try:
        jsonschema.Draft202012Validator.check_schema(schema)
    except jsonschema.SchemaError:
        return False
    return True


def random_output(matcher, rng: random.Random) -> str | None:
    """A text that the masks lead to; None where it has not come to an end."""
    tokens: list[int] = []
    for _ in range(MAX_STEPS):
        if matcher.is_stopped():
            break
        ids = sorted(allowed(matcher))
        assert ids, f"a dead end after {TOKENIZER.decode(tokens)!r}"
        # Printable characters, and ends rather than more: outputs stay short.
        plain = [i for i in ids if i == 0 or 34 <= i < 129]
        ends = [i for i in plain if i == 0 or chr(i - 2) in '"}],']
        token = rng.choice(ends if ends and rng.random() < 0.5 else plain or ids)
        if token == 0:
            break
        assert matcher.consume_token(token)
        tokens.append(token)
    return TOKENIZER.decode(tokens) if matcher.is_accepting() else None


@pytest.mark.parametrize("seed", range(10))
def test_random_schemas_are_refused_or_kept_to(seed):
    rng = random.Random(seed)
    refused = validated = 0
    for _ in range(40):
        schema = random_schema(rng)
        try:
            matcher = matcher_of(json=schema if isinstance(schema, dict | bool) else json.dumps(schema))
        except InvalidRequestError:
            refused += 1
            continue
        for _ in range(3):
            text = random_output(matcher.deep_copy(), rng)
            if text is not None and is_schema(schema):
                jsonschema.Draft202012Validator(schema).validate(json.loads(text))
                validated += 1
    assert validated > 10
    assert refused > 0
    assert EOS == [0]


@pytest.mark.parametrize("field", ["regex", "grammar", "structural_tag", "json"])
def test_random_text_is_refused_or_compiles(field):
    rng = random.Random(field)
    pieces = [
        "start",
        "root",
        "::=",
        ":",
        " ",
        "\n",
        '"a"',
        "/a/",
        "(",
        ")",
        "[a-z]",
        "|",
        "*",
        "+",
        "{2}",
        "{",
        "}",
        "<a>",
        "%json",
        "\\",
        "😀",
        "#",
    ]
    for _ in range(300):
        text = "".join(rng.choices(pieces, k=rng.randrange(1, 12)))
        with contextlib.suppress(InvalidRequestError):
            matcher_of(**{field: text})
