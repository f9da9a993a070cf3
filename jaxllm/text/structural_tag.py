"""Structural tags (free text with constrained parts) to llguidance's Lark dialect.

Two notations are read, as in vLLM: `{"format": ...}`, a tree of formats, and the older
`{"structures": [{"begin", "schema", "end"}], "triggers": [...]}`, which is a `triggered_tags` format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxllm.errors import InvalidRequestError, NotSupportedError
from jaxllm.text.lark import LarkRules, quoted, text_without
from jaxllm.text.lookaround import in_slashes


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
    return writer.grammar(start)


class _Writer(LarkRules):
    """Collects the rules of a format."""

    def __init__(self, json_part: Callable[[Any], str], grammar_part: Callable[[str], str]):
        super().__init__()
        self._json_part = json_part
        self._grammar_part = grammar_part

    def format(self, fmt: Mapping[str, Any]) -> str:
        kind = fmt.get("type")
        if kind == "const_string":
            return quoted(_a_text(fmt, "value"))
        if kind == "json_schema":
            if fmt.get("style", "json") != "json":
                raise NotSupportedError(
                    f"structural_tag: json_schema of style {fmt['style']!r:.100} is not supported", param="structured_outputs"
                )
            return self.rule(f"%json {self._json_part(fmt.get('json_schema'))}")
        if kind == "regex":
            return self.rule(f"%lark {{\nstart: /{in_slashes(_a_text(fmt, 'pattern'))}/\n}}")
        if kind == "grammar":
            return self.rule(f"%lark {{\n{self._grammar_part(_a_text(fmt, 'grammar'))}\n}}")
        if kind == "any_text":
            return self._any_text(fmt)
        if kind == "sequence":
            return self.rule(self._in_turn(fmt))
        if kind == "or":
            return self.rule(" | ".join(self.format(_an_object(item, "elements")) for item in _a_list(fmt, "elements")))
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

    def _any_text(self, fmt: Mapping[str, Any], *, without: Sequence[str] = ()) -> str:
        excluded = [*_texts(fmt, "excludes"), *without]
        return self.terminal(text_without(excluded))

    def _tag(self, fmt: Mapping[str, Any]) -> str:
        return self.rule(f"{quoted(_a_text(fmt, 'begin'))} {self._rest_of_tag(fmt)}")

    def _rest_of_tag(self, fmt: Mapping[str, Any]) -> str:
        """Content and end."""
        content = _an_object(fmt.get("content"), "content")
        ends = _texts(fmt, "end") if isinstance(fmt.get("end"), list) else [_a_text(fmt, "end")]
        if not ends:
            raise _error("a tag's end must not be an empty list")
        return self._in_turn(content if content.get("type") == "sequence" else {"elements": [content]}, ends)

    def _in_turn(self, fmt: Mapping[str, Any], ends: Sequence[str] = ()) -> str:
        """The elements of a sequence, then one of `ends`. Free text stops at the first appearance of what follows it."""
        parts: list[str] = []
        free: Mapping[str, Any] | None = None
        for item in (_an_object(item, "elements") for item in _a_list(fmt, "elements")):
            kind = item.get("type")
            if free is not None:
                opening = _a_text(item, "value") if kind == "const_string" else _a_text(item, "begin") if kind == "tag" else ""
                if not opening:
                    raise NotSupportedError(
                        "structural_tag: behind any_text a const_string or a tag must follow, or nothing", param="structured_outputs"
                    )
                parts += [self._free_up_to(free, [opening]), self._rest_of_tag(item) if kind == "tag" else ""]
                free = None
            elif kind == "any_text":
                free = item
            else:
                parts.append(self.format(item))
        if free is not None and ends and all(ends):
            return " ".join([*parts, self._free_up_to(free, ends)])
        parts += [] if free is None else [self._any_text(free)]
        return " ".join([*parts, f"({' | '.join(map(quoted, ends))})" if ends else ""])

    def _free_up_to(self, fmt: Mapping[str, Any], ends: Sequence[str]) -> str:
        return self.up_to(self._any_text(fmt, without=ends), f"({' | '.join(map(quoted, ends))})")

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
            # Of two that fit, the longer one could not be told from the shorter one in time.
            trigger = min((trigger for trigger in triggers if begin.startswith(trigger)), key=len, default=None)
            if trigger is None:
                raise _error(f"the tag that begins with {begin!r:.100} begins with none of the triggers {triggers!r:.200}")
            rest, more = self._rest_of_tag(tag), begin[len(trigger) :]
            rests.setdefault(trigger, []).append(f"{quoted(more)} {rest}" if more else rest)
            whole.append(f"{quoted(begin)} {rest}")
        text = self.terminal(text_without([*triggers, *_texts(fmt, "excludes")]))
        called = self.rule(" | ".join(f"{self.up_to(text, quoted(t))} ({' | '.join(options)})" for t, options in rests.items()))
        first = self.rule(" | ".join(whole))
        if fmt.get("stop_after_first"):
            return self.rule(first if fmt.get("at_least_one") else f"{called} | {text}")
        return self.rule(f"{first + ' ' if fmt.get('at_least_one') else ''}{called}* {text}")

    def _separated(self, fmt: Mapping[str, Any]) -> str:
        one = self.rule(" | ".join(self._tag(_an_object(item, "tags")) for item in _a_list(fmt, "tags")))
        if fmt.get("stop_after_first"):
            return self.rule(one if fmt.get("at_least_one") else f"({one})?")
        several = f"{one} ({quoted(_a_text(fmt, 'separator'))} {one})*"
        return self.rule(several if fmt.get("at_least_one") else f"({several})?")


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
