"""From structured output parameters to a grammar in llguidance's notation. Nothing here needs a tokenizer or compiles anything."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxllm.errors import InvalidRequestError
from jaxllm.sampling_params import ReasoningMarks, StructuredOutputsParams
from jaxllm.text.gbnf import gbnf_to_lark, is_gbnf
from jaxllm.text.lark import quoted, text_without
from jaxllm.text.lookaround import in_slashes, look_ahead_to_lark
from jaxllm.text.structural_tag import structural_tag_to_lark

# Of a schema, grammar or expression as text. Bounds how long it is read and how deep its chains of rules can be.
MAX_GRAMMAR_CHARS = 512 * 1024
# Of objects and lists in a schema or structural tag.
MAX_JSON_DEPTH = 64
# Keywords of a schema that say nothing of what fits it; that hold schemas by name; and that hold values.
_DESCRIPTIONS = ("title", "description", "examples", "example", "default", "$comment", "deprecated", "readOnly", "writeOnly")
_COMBINING = ("allOf", "oneOf", "not", "if", "dependentSchemas", "unevaluatedProperties")
_MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_VALUES = ("const", "enum", "default", "examples", "example", "x-guidance")
# Keywords whose values are looked into before llguidance sees them: what they hold and, where that is a list, what is in it.
_SHAPES: dict[str, tuple[tuple[type, ...], Any]] = {
    **dict.fromkeys(("properties", "$defs", "definitions"), ((dict,), object)),
    **dict.fromkeys(("anyOf", "oneOf", "allOf"), ((list,), dict | bool)),
    "$ref": ((str,), str),
    "type": ((str, list), str),
    "enum": ((list,), object),
}
# A space, or a newline and an indentation: a model cannot go on with whitespace for ever.
WHITESPACE = r"( |\r?\n[ \t]{0,64})"


def output_grammar(params: StructuredOutputsParams, special_id: Callable[[str], int | None] = lambda text: None) -> str:
    """The grammar that `params` comes to, for `GrammarCompiler`. What llguidance itself finds out (unsupported keywords of a schema,
    errors in expressions and Lark grammars) shows when it is compiled.

    Args:
        special_id: the id of a special token, None for other text: marks of reasoning may be either.

    Raises:
        InvalidRequestError: what can be seen to be wrong without compiling.
    """
    from llguidance import LLMatcher

    if params.after_reasoning is not None:
        return LLMatcher.grammar_from_lark(_after_reasoning(params.after_reasoning, lark_of(params), special_id))
    if params.kind in ("json", "json_object"):
        return LLMatcher.grammar_from_json_schema(_json_constraint(params))
    if params.kind == "regex" and look_ahead_to_lark(params.regex or "") is None:
        return LLMatcher.grammar_from_regex(_checked_text("regex", params.regex))
    return LLMatcher.grammar_from_lark(lark_of(params))


def lark_of(params: StructuredOutputsParams) -> str:
    """The same as a Lark grammar, without the reasoning before it. Raises InvalidRequestError."""
    kind = params.kind
    if kind in ("json", "json_object"):
        return f"start: %json {_json_constraint(params)}\n"
    if kind == "regex":
        pattern = _checked_text("regex", params.regex)
        return look_ahead_to_lark(pattern) or f"start: /{in_slashes(pattern)}/\n"
    if kind == "choice":
        options = [_checked_text("choice", option) for option in params.choice or ()]
        if sum(map(len, options)) + len(options) > MAX_GRAMMAR_CHARS:
            raise _error("choice", f"its {len(options)} texts hold more than {MAX_GRAMMAR_CHARS} characters")
        return f"start: CHOICE\nCHOICE: {' | '.join(map(quoted, dict.fromkeys(options)))}\n"
    if kind == "grammar":
        return _lark(params.grammar)
    tag = _read_json("structural_tag", params.structural_tag)
    if not isinstance(tag, Mapping):
        raise _error("structural_tag", f"it must be an object, got {tag!r:.100}")
    return structural_tag_to_lark(tag, json_part=lambda schema: _schema_text(_schema("structural_tag", schema), params), grammar_part=_lark)


def json_rule(schema: dict[str, Any], *, strict: bool = True) -> str:
    """The body of a Lark rule that a schema, one of `checked_schema`, comes to; without `strict`, keywords that are not supported are
    passed over.
    """
    return f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_pattern': WHITESPACE, 'lenient': not strict}}, ensure_ascii=False)}"


def checked_schema(name: str, value: Any) -> Any:
    """A schema without what only describes, closed to properties that it does not name, where closing cannot make it contradict itself.

    Raises:
        InvalidRequestError: it is none; the message speaks of `name`.
    """
    return closed_where_safe(_described_no_more(_well_shaped(name, _schema(name, value))))


def closed_where_safe(schema: Any) -> Any:
    """`schema` with no properties that it does not name: seldom are others wanted, and seldom does a schema say so. Where objects are put
    together from several schemas, those stay open, since closed they would contradict each other.
    """
    return schema if _mentions(schema, _COMBINING) else _closed(schema)


def _json_constraint(params: StructuredOutputsParams) -> str:
    return _schema_text({"type": "object"} if params.kind == "json_object" else _schema("json", params.json), params)


def _after_reasoning(marks: ReasoningMarks, lark: str, special_id: Callable[[str], int | None]) -> str:
    """`lark` behind reasoning. Marks that are text end the first piece of text in which they appear; special tokens are no text at all.
    What is the answer's cannot come before an end is written: it would not be held to anything.
    """

    def alternatives(texts: list[str]) -> tuple[list[str], list[str]]:
        ids = {text: special_id(text) for text in texts}
        return [f"<[{i}]>" for i in ids.values() if i is not None], [quoted(text) for text, i in ids.items() if i is None]

    tokens, words = alternatives(marks.ends)
    lines = [
        f"ANY_TEXT: {text_without(text for text in marks.implied_ends if special_id(text) is None)}",
        f"body: %lark {{\n{lark}\n}}",
        "NEWLINES: /\\n{0,2}/",
    ]
    ends = []
    if tokens:
        lines.append(f"until_token: ANY_TEXT ({' | '.join(tokens)})")
        ends.append("until_token")
    if words:
        lines.append(f"until_text[lazy]: ANY_TEXT ({' | '.join(words)})")
        ends.append("until_text")
    reasoning = f"({' | '.join(ends)}){' NEWLINES' if marks.newlines else ''}"
    if not marks.is_open:
        starts = " | ".join(part for parts in alternatives(marks.starts) for part in parts)
        reasoning = f"(({starts}) {reasoning})?"
    return "\n".join([f"start: {reasoning} body", *lines, ""])


def _lark(grammar: Any) -> str:
    text = _checked_text("grammar", grammar)
    return gbnf_to_lark(text) if is_gbnf(text) else text


def _schema(name: str, value: Any) -> dict[str, Any]:
    """A schema as an object; `true` allows everything."""
    schema = _read_json(name, value)
    if isinstance(schema, bool):
        return {} if schema else {"not": {}}
    if not isinstance(schema, dict):
        raise _error(name, f"a JSON schema is an object, true or false; got {schema!r:.100}")
    return schema


def _schema_text(schema: dict[str, Any], params: StructuredOutputsParams) -> str:
    """The schema as text, with our options of llguidance over those that it brings."""
    if schema == {"not": {}}:
        raise _error("json", "the schema false matches nothing")
    if params.disable_additional_properties:
        schema = _closed(schema)
    given = schema.get("x-guidance")
    options = {**(given if isinstance(given, dict) else {}), "lenient": False}
    if params.disable_any_whitespace:
        options |= {"whitespace_flexible": False}
        options.pop("whitespace_pattern", None)
    else:
        options["whitespace_pattern"] = WHITESPACE if params.whitespace_pattern is None else params.whitespace_pattern
    return json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)


def _closed(schema: Any) -> Any:
    """`schema` with no other properties where an object names some and does not say."""
    schema = _with_parts(schema, _closed)
    if not isinstance(schema, dict) or not isinstance(schema.get("properties"), dict):
        return schema
    return schema if {"additionalProperties", "unevaluatedProperties"} & schema.keys() else {**schema, "additionalProperties": False}


def _mentions(value: Any, words: tuple[str, ...]) -> bool:
    if isinstance(value, dict):
        return any(word in value for word in words) or any(_mentions(part, words) for part in value.values())
    return isinstance(value, list) and any(_mentions(part, words) for part in value)


def _well_shaped(name: str, schema: Any) -> Any:
    """The schema itself. Raises InvalidRequestError where a keyword of `_SHAPES` holds something else."""
    for key, (kinds, inner) in _SHAPES.items() if isinstance(schema, dict) else ():
        value = schema.get(key, next(iter(kinds))())
        if not isinstance(value, kinds) or (isinstance(value, list) and not all(isinstance(item, inner) for item in value)):
            raise _error(name, f"{key} cannot be {value!r:.100}")
    return _with_parts(schema, lambda part: _well_shaped(name, part))


def _described_no_more(schema: Any) -> Any:
    schema = _with_parts(schema, _described_no_more)
    return {key: value for key, value in schema.items() if key not in _DESCRIPTIONS} if isinstance(schema, dict) else schema


def _with_parts(schema: Any, change: Callable[[Any], Any]) -> Any:
    """`schema` with the schemas in it changed."""
    if not isinstance(schema, dict):
        return schema
    out: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _MAPS_OF_SCHEMAS and isinstance(value, dict):
            out[key] = {name: change(part) for name, part in value.items()}
        elif isinstance(value, list) and key not in _VALUES:
            out[key] = [change(part) for part in value]
        else:
            out[key] = value if key in _VALUES else change(value)
    return out


def _read_json(name: str, value: Any) -> Any:
    """A JSON value given as such or as text: it can be written, is not too large or deep, and holds only text that can be generated."""
    if isinstance(value, str):
        _checked_text(name, value)
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise _error(name, f"it is not JSON: {error}") from error
    try:
        size = len(json.dumps(value, allow_nan=False, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise _error(name, f"it is not JSON: {error}") from error
    if size > MAX_GRAMMAR_CHARS:
        raise _error(name, f"it has {size} characters; at most {MAX_GRAMMAR_CHARS} are read")
    for text, depth in _walk(value):
        if depth > MAX_JSON_DEPTH:
            raise _error(name, f"it nests more than {MAX_JSON_DEPTH} deep")
        if text is not None:
            _checked_text(name, text)
    return value


def _walk(value: Any) -> Iterator[tuple[str | None, int]]:
    """Every string with its depth, and every container (as None) with its."""
    stack = [(value, 0)]
    while stack:
        item, depth = stack.pop()
        if isinstance(item, str):
            yield item, depth
            continue
        if not isinstance(item, Mapping | list | tuple):
            continue
        yield None, depth + 1
        if depth > MAX_JSON_DEPTH:
            continue
        if isinstance(item, Mapping):
            stack += [(key, depth + 1) for key in item]
            item = item.values()
        stack += [(part, depth + 1) for part in item]


def _checked_text(name: str, text: Any) -> str:
    if not isinstance(text, str):
        raise _error(name, f"it must be text, got {text!r:.100}")
    if len(text) > MAX_GRAMMAR_CHARS:
        raise _error(name, f"it has {len(text)} characters; at most {MAX_GRAMMAR_CHARS} are read")
    if "\0" in text:
        raise _error(name, "it holds the character NUL, which no output may")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _error(name, "it holds a lone surrogate, which is not text") from None
    return text


def _error(name: str, reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"structured_outputs.{name} cannot be used: {reason}", param="structured_outputs")
