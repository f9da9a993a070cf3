"""Structural tags (free text with constrained parts) to llguidance's Lark dialect.

Two notations are read, as in vLLM: `{"format": ...}`, a tree of formats, and the older
`{"structures": [{"begin", "schema", "end"}], "triggers": [...]}`, which is a `triggered_tags` format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from jaxllm.errors import InvalidRequestError, NotSupportedError
from jaxllm.text.lookaround import in_slashes

_ANY_TEXT = r"/(?s:.)*/"


def structural_tag_to_lark(tag: Mapping[str, Any], *, json_part: Callable[[Any], str], grammar_part: Callable[[str], str]) -> str:
    """The grammar of a structural tag.

    Args:
        json_part: checks a JSON schema and gives the text that follows `%json`.
        grammar_part: the Lark text of a Lark or GBNF grammar.

    Raises:
        InvalidRequestError: something is missing or of a wrong type; the message names it.
        NotSupportedError: a format that is known and not offered.
    """
    writer = _Writer(json_part, grammar_part)
    if "format" in tag:
        start = writer.format(_an_object(tag["format"], "format"))
    else:
        structures = [_an_object(item, "structures") for item in _a_list(tag, "structures")]
        tags = [
            {**item, "content": {"type": "json_schema", "json_schema": item.get("schema", item.get("json_schema"))}} for item in structures
        ]
        start = writer.format({"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags})
    return "\n".join([f"start: {start}", *writer.lines, ""])


class _Writer:
    """Collects the rules of a format; every method returns the text that stands for its format in a rule."""

    def __init__(self, json_part: Callable[[Any], str], grammar_part: Callable[[str], str]):
        self.lines: list[str] = []
        self._json_part = json_part
        self._grammar_part = grammar_part

    def format(self, fmt: Mapping[str, Any]) -> str:
        kind = fmt.get("type")
        if kind == "const_string":
            return _quoted(_a_text(fmt, "value"))
        if kind == "json_schema":
            if fmt.get("style", "json") != "json":
                raise NotSupportedError(
                    f"structural_tag: json_schema of style {fmt['style']!r:.100} is not supported", param="structured_outputs"
                )
            return self._rule(f"%json {self._json_part(fmt.get('json_schema'))}")
        if kind == "regex":
            return self._rule(f"%lark {{\nstart: /{in_slashes(_a_text(fmt, 'pattern'))}/\n}}")
        if kind == "grammar":
            return self._rule(f"%lark {{\n{self._grammar_part(_a_text(fmt, 'grammar'))}\n}}")
        if kind == "any_text":
            return self._any_text(fmt)
        if kind in ("sequence", "or"):
            parts = [self.format(_an_object(item, "elements")) for item in _a_list(fmt, "elements")]
            return self._rule((" " if kind == "sequence" else " | ").join(parts))
        if kind == "tag":
            return self._tag(fmt)
        if kind == "triggered_tags":
            return self._triggered(fmt)
        if kind == "tags_with_separator":
            return self._separated(fmt)
        if kind in ("qwen_xml_parameter", "star", "plus", "optional", "repeat", "dispatch", "token", "exclude_token", "any_tokens"):
            raise NotSupportedError(
                f"structural_tag: the format {kind!r} is not supported; express it with grammar", param="structured_outputs"
            )
        raise _error(
            f"the format's type must be const_string, json_schema, regex, grammar, any_text, sequence, or, tag, triggered_tags or "
            f"tags_with_separator; got {kind!r:.100}"
        )

    def _rule(self, body: str, marks: str = "") -> str:
        name = f"f{len(self.lines)}"
        self.lines.append(f"{name}{marks}: {body}")
        return name

    def _terminal(self, body: str) -> str:
        name = f"F{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        return name

    def _any_text(self, fmt: Mapping[str, Any], *, without: list[str] | None = None) -> str:
        excluded = [*_texts(fmt, "excludes"), *(without or ())]
        return self._terminal(_text_without(excluded))

    def _tag(self, fmt: Mapping[str, Any]) -> str:
        return self._rule(f"{_quoted(_a_text(fmt, 'begin'))} {self._rest_of_tag(fmt)}")

    def _rest_of_tag(self, fmt: Mapping[str, Any]) -> str:
        """Content and end. Free text stops at the end's first appearance."""
        content = _an_object(fmt.get("content"), "content")
        ends = _texts(fmt, "end") if isinstance(fmt.get("end"), list) else [_a_text(fmt, "end")]
        if not ends:
            raise _error("a tag's end must not be an empty list")
        tail = f"({' | '.join(map(_quoted, ends))})"
        if content.get("type") == "any_text" and all(ends):
            return self._up_to(self._any_text(content, without=ends), tail)
        return f"{self.format(content)} {tail}"

    def _up_to(self, text: str, end: str) -> str:
        """Text and what ends it, in one piece: the lexer would not give back the beginning of an end that it took for text."""
        return self._rule(f"{text} {end}", "[lazy]")

    def _triggered(self, fmt: Mapping[str, Any]) -> str:
        """Text in which no trigger appears, then a trigger and the rest of one of its tags, again and again. With at_least_one, a tag
        comes before any text.
        """
        triggers = _texts(fmt, "triggers")
        tags = [_an_object(item, "tags") for item in _a_list(fmt, "tags")]
        if not triggers or not all(triggers):
            raise _error("triggers must be a list of at least one non-empty string")
        rests: dict[str, list[str]] = {}
        whole: list[str] = []
        for tag in tags:
            begin = _a_text(tag, "begin")
            trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
            if trigger is None:
                raise _error(f"the tag that begins with {begin!r:.100} begins with none of the triggers {triggers!r:.200}")
            rest, more = self._rest_of_tag(tag), begin[len(trigger) :]
            rests.setdefault(trigger, []).append(f"{_quoted(more)} {rest}" if more else rest)
            whole.append(f"{_quoted(begin)} {rest}")
        text = self._terminal(_text_without([*triggers, *_texts(fmt, "excludes")]))
        called = self._rule(" | ".join(f"{self._up_to(text, _quoted(t))} ({' | '.join(options)})" for t, options in rests.items()))
        first = self._rule(" | ".join(whole))
        if fmt.get("stop_after_first"):
            return self._rule(first if fmt.get("at_least_one") else f"{called} | {text}")
        return self._rule(f"{first + ' ' if fmt.get('at_least_one') else ''}{called}* {text}")

    def _separated(self, fmt: Mapping[str, Any]) -> str:
        one = self._rule(" | ".join(self._tag(_an_object(item, "tags")) for item in _a_list(fmt, "tags")))
        if fmt.get("stop_after_first"):
            return self._rule(one if fmt.get("at_least_one") else f"({one})?")
        several = f"{one} ({_quoted(_a_text(fmt, 'separator'))} {one})*"
        return self._rule(several if fmt.get("at_least_one") else f"({several})?")


def _text_without(texts: list[str]) -> str:
    """A terminal of any text in which none of `texts` appears."""
    if not texts:
        return _ANY_TEXT
    anywhere = "|".join(in_slashes(re.escape(text)) for text in texts)
    return f"{_ANY_TEXT} & ~/(?s:.)*({anywhere})(?s:.)*/"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _error(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"structured_outputs.structural_tag is not valid: {reason}", param="structured_outputs")


def _an_object(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _error(f"{name} must hold objects, got {value!r:.100}")
    return value


def _a_list(fmt: Mapping[str, Any], name: str) -> list[Any]:
    value = fmt.get(name)
    if not isinstance(value, list) or not value:
        raise _error(f"{name} must be a list that is not empty, got {value!r:.100}")
    return value


def _a_text(fmt: Mapping[str, Any], name: str) -> str:
    value = fmt.get(name)
    if not isinstance(value, str):
        raise _error(f"{name} must be a string, got {value!r:.100}")
    return value


def _texts(fmt: Mapping[str, Any], name: str) -> list[str]:
    value = fmt.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise _error(f"{name} must be a list of strings, got {value!r:.100}")
    return value
