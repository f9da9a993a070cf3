"""Formats of tool calls as grammars: what their parsers read, narrowed to calls of given functions with arguments that fit their schemas.

A grammar is written in llguidance's Lark dialect. It asks for one spelling where a parser forgives many, leaves white space to the model,
and puts arguments in the order of the schema's properties.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxllm.server.parsers.formats import HarmonyCalls, HeaderCalls, JsonCalls, PythonCalls, TaggedCalls, ToolFormat
from jaxllm.server.parsers.functions import (
    Function,
    InexpressibleError,
    definitions_of,
    first_type,
    is_any_text,
    literals_of,
    properties_of,
    referred,
)
from jaxllm.server.parsers.literals import JSON, Dialect
from jaxllm.server.parsers.parser import section_openings
from jaxllm.server.parsers.schema import ToolSchemas
from jaxllm.text.grammar import WHITESPACE, json_rule
from jaxllm.text.lark import ANY_TEXT, LarkRules, quoted, text_without
from jaxllm.text.lookaround import in_slashes

# A list of calls in plain JSON: for formats that no grammar expresses, and for models whose format nobody named.
PLAIN_CALLS = JsonCalls(name="json", bare="[", arguments=("parameters", "arguments"))

_PYTHON = {"boolean": '"True" | "False"', "string": r"/'[^'\\\n]*'/", "null": '"None"'}
_BRACE = 'WS? "}"'
_NAME = re.compile(r"[A-Za-z0-9_.\-]+")
_KEY = re.compile(r"[A-Za-z0-9_.\-$ ]+")
_IDENTIFIER = re.compile(r"[A-Za-z0-9_]+")
_NOTATION = {"type", "properties", "required", "additionalProperties", "items", "$defs", "definitions"}


def calls_grammar(form: ToolFormat, functions: Sequence[Function], special: Mapping[str, int], *, several: bool) -> str:
    """The grammar of an answer that is calls and nothing else.

    Args:
        special: ids of the special tokens by their text: they are no text for a grammar.
        several: whether there may be more than one call.

    Raises:
        InexpressibleError: the format, or a schema in it, has no grammar.
    """
    writer = _Writer(form, functions, special, several=several)
    if isinstance(form, HarmonyCalls):
        return writer.complete(f"{writer.thoughts()}* {writer.calls()}")
    return writer.complete(writer.calls())


def calls_or_text_grammar(form: ToolFormat, functions: Sequence[Function], special: Mapping[str, int], *, several: bool) -> str:
    """The same, where text may stand before, between and behind the calls, or instead of them.

    Arguments of functions that are not strict are held to their schemas as far as the format can.
    """
    writer = _Writer(form, functions, special, several=several, loose=True)
    return writer.complete(writer.calls_or_text())


def calls_or_body_grammar(form: ToolFormat, functions: Sequence[Function], special: Mapping[str, int], *, several: bool, body: str) -> str:
    """The same, where instead of the calls there may be an answer that the Lark grammar `body` matches."""
    writer = _Writer(form, functions, special, several=several, loose=True)
    inner = writer.rule(f"%lark {{\n{body}\n}}")
    if isinstance(form, HarmonyCalls):
        calls = f"{writer.calls()} | " if functions else ""
        return writer.complete(f"{writer.thoughts()}* ({calls}{writer.final(inner)})")
    return writer.complete(writer.calls_or_body(inner))


class _Writer(LarkRules):
    """Collects the rules of a format."""

    def __init__(self, form: ToolFormat, functions: Sequence[Function], special: Mapping[str, int], *, several: bool, loose: bool = False):
        super().__init__()
        self._form = form
        self._functions = functions
        self._several = several
        self._loose = loose
        self._special = special
        # Rules of what schemas refer to, by function and reference.
        self._references: dict[tuple[str, str], str] = {}
        self._split = re.compile("(" + "|".join(map(re.escape, sorted(special, key=len, reverse=True))) + ")") if special else None

    def complete(self, start: str) -> str:
        return self.grammar(start, f"WS: /{in_slashes(WHITESPACE)}/", "NUMBER: /[0-9]{1,4}/", "WORD: /[A-Za-z0-9_]{1,64}/")

    def literal(self, text: str) -> str:
        """Text with its special tokens."""
        return " ".join(f"<[{self._special[piece]}]>" if piece in self._special else quoted(piece) for piece in self._pieces(text))

    def until(self, text: str, body: str = ANY_TEXT) -> str:
        """Anything up to and with the first appearance of `text`."""
        pieces = self._pieces(text)
        first = next((index for index, piece in enumerate(pieces) if piece in self._special), None)
        if first is None:
            return self.up_to(self.terminal(body), quoted(text))
        # Special tokens are no text, so that nothing has to be given back.
        before = "".join(pieces[:first])
        free = self.terminal(f"{body} {quoted(before)}" if before else body)
        return f"{free} {self.literal(''.join(pieces[first:]))}"

    def _pieces(self, text: str) -> list[str]:
        return [piece for piece in (self._split.split(text) if self._split else [text]) if piece]

    # ----------------------------------------------------------------------------------------------- answers

    def calls(self) -> str:
        """At least one call."""
        if isinstance(self._form, HarmonyCalls):
            return self._harmony_call()
        marked = self._marked_calls()
        if not self._is_bare:
            return marked
        return f"{self.rule(self._rest())} | {marked}" if marked else self.rule(self._rest())

    def calls_or_text(self) -> str:
        form = self._form
        if isinstance(form, HarmonyCalls):
            return f"{self.thoughts()}* ({self._harmony_call()} | {self.final(self.terminal(ANY_TEXT))})"
        words = section_openings(form) - set(form.bare_anywhere)
        bare = _bare_call(form) if self._is_bare else ""
        parts = [self.rule(self._rest())] if bare else []
        called = ""
        if self._openings:
            begun = [self.until(opening, self._text_without(words - {opening}, bare)) for opening in self._openings]
            called = self.rule(f"({' | '.join(begun)}) {self._rest()}") + ("*" if self._several else "?")
        parts.append(f"{called} {self.terminal(self._text_without(words, bare))}")
        return " | ".join(parts)

    def calls_or_body(self, body: str) -> str:
        # A bare object is told from a body of JSON by what a lexer cannot go back for: there calls need their marker.
        if isinstance(self._form, JsonCalls) and self._is_bare:
            marked = self._marked_calls()
            return f"{marked} | {body}" if marked else body
        return f"{self.calls()} | {body}"

    def _marked_calls(self) -> str:
        """Sections that begin with a marker; empty where the format has none."""
        if not self._openings:
            return ""
        section = self.rule(f"{self.one_of([self.literal(opening) for opening in self._openings])} {self._rest()}")
        return self.rule(f"{section} (WS? {section})*") if self._several else section

    def _text_without(self, words: Iterable[str], start: str) -> str:
        """Words with special tokens cannot be in text."""
        return text_without(sorted(word for word in words if len(self._pieces(word)) == 1 and word not in self._special), start)

    @property
    def _is_bare(self) -> bool:
        """Whether calls may stand without a marker."""
        return bool(self._form.bare or self._form.bare_anywhere)

    @property
    def _openings(self) -> tuple[str, ...]:
        """The markers that begin a section."""
        form = self._form
        words = form.opens or (form.call_opens[:1] if isinstance(form, TaggedCalls) else ())
        return tuple(word for word in words if not any(other != word and other.startswith(word) for other in words))

    def _rest(self) -> str:
        """What follows the opening of a section."""
        form = self._form
        if isinstance(form, JsonCalls):
            return self._json_section(form)
        if isinstance(form, HeaderCalls):
            return self._header_section(form)
        if isinstance(form, TaggedCalls):
            return self._tagged_section(form)
        assert isinstance(form, PythonCalls)
        return self._python_section(form)

    def _each(self, write: Callable[[Function], str], *, any_name: bool = False) -> str:
        for function in self._functions:
            if not any_name and not _NAME.fullmatch(function.name):
                raise InexpressibleError(f"{self._form.name} has no way to write the name {function.name!r:.100}")
        return self.one_of([write(function) for function in self._functions])

    def _arguments(self, function: Function) -> str:
        return self.rule(json_rule(function.schema, strict=function.strict))

    def _may_be_loose(self, function: Function) -> bool:
        return self._loose and not function.strict

    def _properties(self, function: Function) -> tuple[list[tuple[str, Any, bool]], bool]:
        """Each argument with its schema and whether it must be there; and whether there may be others of any kind."""
        try:
            return properties_of(function)
        except InexpressibleError:
            if self._may_be_loose(function):
                return [], True
            raise

    def _repeated(self, one: str, separator: str) -> str:
        return f"{one} ({separator} {one})*" if self._several else one

    # ------------------------------------------------------------------------------------------------- formats

    def _json_section(self, form: JsonCalls) -> str:
        one = self._json_calls(form)
        bare = form.bare + form.bare_anywhere
        bodies = []
        if not bare or "{" in bare:
            more = f"({self._json_calls(form, f'{quoted(form.separators[0])} WS? ')})*" if form.separators and self._several else ""
            bodies.append(f"{one} {more}")
        if not bare or "[" in bare:
            first = self._json_calls(form, '"[" WS? ') if bare else f'"[" WS? {one}'
            more = f'(WS? "," WS? {one})*' if self._several else ""
            bodies.append(f'{first} {more} WS? "]"')
        # Its end may be left out, as some models of the family do.
        close = f"(WS? {self.one_of([self.literal(word) for word in form.closes])})?" if form.closes else ""
        return f"WS? ({' | '.join(bodies)}) {close}"

    def _json_calls(self, form: JsonCalls, lead: str = "") -> str:
        """One call. What comes before its brace is one piece with it, where that tells a call from text."""
        return self._each(lambda function: self._json_call(form, function, lead), any_name=True)

    def _json_call(self, form: JsonCalls, function: Function, lead: str) -> str:
        name = quoted(json.dumps(function.name, ensure_ascii=False))
        arguments = self._arguments(function)
        if form.name_is_key:
            head = self.terminal(f'{lead}"{{" WS? {name} WS? ":" WS?')
            return self.rule(f"{head} {arguments} {self.terminal(_BRACE)}")
        letters = "[A-Za-z0-9]{9}" if form.id_style == "mistral" else r"[A-Za-z0-9_:.\-]{1,64}"
        member = f'{_key(form.ids[0])} WS? ":" WS? /"{letters}"/' if form.ids else ""
        before = f'({member} WS? "," WS?)? ' if member and not form.id_may_follow else ""
        after = f'(WS? "," WS? {member})? ' if member and form.id_may_follow else ""
        keys = " | ".join(map(_key, form.arguments))
        head = f'{lead}"{{" WS? {before}{_key(form.names[0])} WS? ":" WS? {name} WS? "," WS? ({keys}) WS? ":" WS?'
        return self.rule(f"{self.terminal(head)} {arguments} {self.terminal(after + _BRACE)}")

    def _header_section(self, form: HeaderCalls) -> str:
        def call(function: Function) -> str:
            end = self.literal(form.header_ends[0]) if form.header_ends else ""
            return self.rule(f"{self._template(form.written, name=function.name)} {end} WS? {self._object(form.dialect, function)}")

        one = self._each(call)
        if form.call_opens:
            closers = " WS? ".join(map(self.literal, form.call_closes))
            one = self.rule(f"{self.literal(form.call_opens[0])} {one} WS? {closers}")
            one = self._repeated(one, "WS?")
        return f"WS? {one} WS? {self.literal(form.closes[0])}" if form.closes else f"WS? {one}"

    def _object(self, dialect: Dialect, function: Function) -> str:
        if dialect is JSON:
            return self._arguments(function)
        known, _ = self._properties(function)
        return self._members(dialect, known, function)

    def _members(self, dialect: Dialect, known: Sequence[tuple[str, Any, bool]], function: Function) -> str:
        parts = []
        for key, schema, _ in known:
            if not _IDENTIFIER.fullmatch(key):
                raise InexpressibleError(f"{self._form.name} has no way to write the key {key!r:.100}")
            parts.append(self.rule(f"{quoted(key + ':')} {self._notation(dialect, schema, function)}"))
        return self.rule(f'"{{" {self._listed(parts, [required for _, _, required in known])} "}}"')

    def _notation(self, dialect: Dialect, schema: Any, function: Function) -> str:
        """A value in a notation of its own, of a schema whose words are those of `_NOTATION`."""
        marker = dialect.string_marker
        assert marker is not None
        reference = schema.get("$ref")
        if reference is not None:
            key = function.name, reference
            if key not in self._references:
                self._references[key] = f"ref{len(self._references)}"
                self.lines.append(f"{self._references[key]}: {self._notation(dialect, referred(schema), function)}")
            return self._references[key]
        literals = schema.get("enum") or ([schema["const"]] if "const" in schema else None)
        if literals and all(value is None or isinstance(value, str | int | float) for value in literals):
            texts = [marker + value + marker if isinstance(value, str) else json.dumps(value) for value in literals]
            return self.one_of([self.literal(text) for text in texts])
        branches = schema.get("anyOf") or schema.get("oneOf")
        if branches and all(isinstance(branch, dict) for branch in branches):
            return self.one_of([self._notation(dialect, {**branch, **definitions_of(schema)}, function) for branch in branches])
        kind = schema.get("type", "object" if "properties" in schema else None)
        if isinstance(kind, list):
            return self.one_of([self._notation(dialect, {**schema, "type": one}, function) for one in kind])
        if kind in ("integer", "number", "boolean", "null"):
            return self.rule(json_rule(schema, strict=function.strict))
        items = schema.get("items", {})
        unheard = (schema.keys() - _NOTATION) | (set() if isinstance(items, dict) else {"items"})
        if "properties" not in schema and (schema.get("required") or schema.get("additionalProperties") not in (None, True, {})):
            unheard.add("required or additionalProperties")
        if unheard and not self._may_be_loose(function):
            raise InexpressibleError(f"{self._form.name} cannot hold its values to {', '.join(sorted(unheard))}")
        if kind == "string":
            return self.rule(f"{self.literal(marker)} {self.until(marker)}")
        if kind == "array":
            item = self._notation(dialect, {**(items if isinstance(items, dict) else {}), **definitions_of(schema)}, function)
            return self.rule(f'"[" ({item} ("," {item})*)? "]"')
        if kind == "object" and "properties" in schema:
            return self._members(dialect, properties_of(Function(function.name, schema, strict=True))[0], function)
        anything = self._anything(dialect)
        return self.rule(f'"{{" (WORD ":" {anything} ("," WORD ":" {anything})*)? "}}"') if kind == "object" else anything

    def _anything(self, dialect: Dialect) -> str:
        name = f"any{len(self.lines)}"
        text = f"{self.literal(dialect.string_marker or '')} {self.until(dialect.string_marker or '')}"
        scalar = self.rule(json_rule({"type": ["number", "boolean", "null"]}))
        self.lines.append(
            f'{name}: {text} | {scalar} | "[" ({name} ("," {name})*)? "]" | "{{" (WORD ":" {name} ("," WORD ":" {name})*)? "}}"'
        )
        return name

    def _listed(self, parts: Sequence[str], required: Sequence[bool]) -> str:
        """Parts in this order with commas between them; those that are not required may be left out."""
        # From the last one to the first: how the list goes on behind one that was written, and how it begins here.
        later = first = ""
        for part, needed in zip(reversed(parts), reversed(required), strict=True):
            begun = f"{part} {later}"
            first = self.rule(begun if needed else f"({begun})?" if not first else f"{begun} | {first}")
            later = self.rule(f'("," WS? {part}){"" if needed else "?"} {later}')
        return first

    def _tagged_section(self, form: TaggedCalls) -> str:
        close = self.literal(form.call_closes[0])
        end = f"({self.literal(form.name_ends[0])}){'?' if form.name_stops else ''}"

        def call(function: Function) -> str:
            known, open_ended = self._properties(function)
            parts = [f"({self._tagged_value(form, function, key, schema)} WS?){'' if required else '?'}" for key, schema, required in known]
            if open_ended:
                key = self.rule(self._template(form.written_key, string="true", type="string", key=None))
                value = f"WS? {self.literal(form.value_open)} " if form.value_open else ""
                anything = f"{self.literal(form.key_open)} {key} {self.literal(form.key_end)} {value}{self.until(form.value_close)} WS?"
                parts.append(f"({anything})*")
            return self.rule(f"{self._template(form.written, name=function.name)} {end} WS? {' '.join(parts)} {close}")

        one = self._each(call)
        if not form.opens:
            return one
        one = self.rule(f"{self.literal(form.call_opens[0])} {one}")
        return f"WS? {self._repeated(one, 'WS?')} WS? {self.literal(form.closes[0])}"

    def _tagged_value(self, form: TaggedCalls, function: Function, key: str, schema: Any) -> str:
        if not _KEY.fullmatch(key):
            raise InexpressibleError(f"{form.name} has no way to write the argument {key!r:.100}")
        types = ToolSchemas([{"name": function.name, "parameters": function.schema}]).types(function.name, key)
        literals = literals_of(schema)
        is_text = literals is None and (types is None or "string" in types)
        if is_text and not (self._may_be_loose(function) or is_any_text(schema, types)):
            raise InexpressibleError(f"text in tags cannot be held to the schema of {key!r:.100}")
        # The tag says of a text that may be of another type that it is no string.
        string = types is None or types == {"string"}
        tag = self._template(form.written_key, key=key, string=str(string).lower(), type="string" if string else first_type(types))
        value = f"WS? {self.literal(form.value_open)}" if form.value_open else ""
        head = f"{self.literal(form.key_open)} {tag} {self.literal(form.key_end)} {value}"
        if is_text:
            return self.rule(f"{head} {self.until(form.value_close)}")
        line = '"\\n"?' if form.value_lines else ""
        inner = self.one_of(literals) if literals is not None else self.rule(json_rule(schema, strict=function.strict))
        return self.rule(f"{head} {line} {inner} {line} {self.literal(form.value_close)}")

    def _python_section(self, form: PythonCalls) -> str:
        one = self._each(self._python_call)
        if form.lines:
            return f"WS? {self._repeated(one, 'WS')} WS? {self.literal(form.closes[0])}"
        close = f"(WS? {self.literal(form.closes[0])})?" if form.closes else ""
        first = self._each(lambda function: self._python_call(function, '"[" WS? '))
        more = f'("," WS? {one})*' if self._several else ""
        return f'WS? {first} {more} "]" {close}'

    def _python_call(self, function: Function, lead: str = "") -> str:
        known, _ = self._properties(function)
        parts = []
        for key, schema, _ in known:
            if not _IDENTIFIER.fullmatch(key):
                raise InexpressibleError(f"{self._form.name} has no way to write the argument {key!r:.100}")
            value = self.rule(json_rule(schema, strict=function.strict))
            # As Python has it, where that is as simple.
            kinds = schema.get("type") if not schema.keys() - {"type", "$defs", "definitions"} else None
            python = [_PYTHON[kind] for kind in (kinds if isinstance(kinds, list) else [kinds]) if kind in _PYTHON]
            parts.append(self.rule(f"{quoted(key + '=')} {self.one_of([value, *python])}"))
        head = self.terminal(f"{lead}{quoted(function.name + '(')}")
        return self.rule(f'{head} {self._listed(parts, [required for _, _, required in known])} ")"')

    def _template(self, text: str, **values: str | None) -> str:
        """A template with `values` in it. Its {n} is any number, and a value of None any word."""
        parts = []
        for piece in re.split(r"(\{\w+\})", text):
            value = values.get(piece[1:-1], piece) if piece.startswith("{") else piece
            if piece == "{n}":
                parts.append("NUMBER")
            elif value is None:
                parts.append("WORD")
            elif value:
                parts.append(self.literal(value))
        return " ".join(parts)

    # ------------------------------------------------------------------------------------------------- harmony

    def thoughts(self) -> str:
        """One message before the answer, which may be one of many: reasoning, or words to the user."""
        head = f"{self.literal('<|channel|>')} ({quoted('analysis')} | {quoted('commentary')}) {self.literal('<|message|>')}"
        return self.rule(f"{head} {self.until('<|end|>')} {self.literal('<|start|>assistant')}")

    def final(self, body: str) -> str:
        return self.rule(f"{self.literal('<|channel|>final')} {self._harmony_json()} {self.literal('<|message|>')} {body}")

    def _harmony_call(self) -> str:
        def call(function: Function) -> str:
            head = self.literal(f"<|channel|>commentary to=functions.{function.name}")
            return self.rule(f"{head} {self._harmony_json()} {self.literal('<|message|>')} {self._arguments(function)}")

        return self._each(call)

    def _harmony_json(self) -> str:
        constrain = self.literal("<|constrain|>json")
        return f'(" "? {constrain})?'


def _bare_call(form: ToolFormat) -> str:
    """A regular expression of text that holds a bare call."""
    if isinstance(form, JsonCalls):
        keys = "|".join((*form.names, *form.arguments, *form.ids, "type"))
        where = r"(?s:.)*" if form.bare_anywhere else r"\s*\[?\s*"
        return rf"{where}\{{\s*[\"']({keys})[\"'](?s:.)*"
    return r"\s*\[\s*[A-Za-z0-9_.\-]+\s*\((?s:.)*"


def _key(name: str) -> str:
    return quoted(json.dumps(name))
