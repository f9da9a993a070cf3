"""GBNF, the EBNF dialect of llama.cpp's grammars, to llguidance's Lark dialect.

    root ::= "yes" | "no " reason{1,3}     # strings, classes, groups, *, +, ?, {m,n}, rules; newlines count as spaces

Rules that do not recurse describe regular languages. They, and every run of regular items elsewhere, become terminals: llguidance's lexer
takes the longest match of a terminal, and so a terminal matches exactly what the grammar says only if nothing is cut out of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby

from jaxllm.errors import InvalidRequestError

MAX_DEPTH = 64

_RULE = re.compile(r"(?m)^[^\S\n]*[A-Za-z_][\w-]*\s*::=")
_CHAR = re.compile(r"\\x[0-9A-Fa-f]{2}|\\u[0-9A-Fa-f]{4}|\\U[0-9A-Fa-f]{8}|\\.|[^\\]", re.DOTALL)
_RANGE = re.compile(f"({_CHAR.pattern})(?:-({_CHAR.pattern}))?", re.DOTALL)
_COUNT = re.compile(r"\{\s*(\d*)\s*(,?)\s*(\d*)\s*\}")
# A rule's name is one with its `::=`, so that it is told from a reference. What is once matched is kept (`*+`), and a class without an end
# is taken whole: going back over a hostile grammar would take for ever.
_TOKEN = re.compile(
    r"""(?:\s|\#[^\n]*)++
    | (?P<rule>([A-Za-z_][\w-]*)(?:\s|\#[^\n]*)*+::=) | (?P<name>[A-Za-z_][\w-]*)
    | (?P<string>"(?:[^"\\\n]|\\.)*") | (?P<class>\[(?:[^\]\\]|\\.)*+\]) | (?P<count>\{[^{}]*\})
    | (?P<mark>\[(?:[^\]\\]|\\.)*+ | .)""",
    re.DOTALL | re.VERBOSE,
)
_MAX_DIGITS = 6
_SIMPLE_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}


@dataclass(frozen=True)
class _Node:
    """`kind` is text (`value`: a string or a class of characters in Lark), rule (its name), repeat (`value`: how often its part comes),
    sequence or choice of `parts`.
    """

    kind: str
    value: str = ""
    parts: tuple[_Node, ...] = ()


def is_gbnf(grammar: str) -> bool:
    """Whether a grammar defines a rule by `::=`, which Lark does not."""
    return _RULE.search(grammar) is not None


def gbnf_to_lark(grammar: str) -> str:
    """The same language in Lark, for llguidance.

    Raises:
        InvalidRequestError: a syntax error, a rule that is missing, or no rule `root`.
    """
    rules = _Parser(grammar).rules()
    if "root" not in rules:
        raise _error(f"it has no rule 'root'; its rules are {', '.join(map(repr, rules))}"[:500])
    try:
        for name, body in rules.items():
            for other in _references(body):
                if other not in rules:
                    raise _error(f"rule {name!r} refers to {other!r}, which is not defined")
        return _Writer(rules).lark()
    except RecursionError:
        raise _error("repetitions of groups of repetitions nest too deep") from None


def _error(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"structured_outputs.grammar is no valid GBNF: {reason}", param="structured_outputs")


class _Parser:
    """Recursive descent; groups nest at most MAX_DEPTH deep."""

    def __init__(self, text: str):
        self._text = text
        self._tokens = [token for token in _TOKEN.finditer(text) if token.lastgroup]
        self._at = 0
        self._depth = 0

    @property
    def _kind(self) -> str | None:
        """The kind of the next token; of a mark, the mark itself; None at the end."""
        if self._at == len(self._tokens):
            return None
        token = self._tokens[self._at]
        return token[0][0] if token.lastgroup == "mark" else token.lastgroup

    def _take(self) -> str:
        self._at += 1
        return self._tokens[self._at - 1][0]

    def rules(self) -> dict[str, _Node]:
        rules: dict[str, _Node] = {}
        while self._kind is not None:
            if self._kind != "rule":
                raise self._expected("no ')' without '('" if self._kind == ")" else "a rule, as in name ::= ...")
            name = self._tokens[self._at][2]
            if name in rules:
                raise _error(f"rule {name!r} is defined twice")
            self._at += 1
            rules[name] = self._choice()
        return rules

    def _choice(self) -> _Node:
        options = [self._sequence()]
        while self._kind == "|":
            self._at += 1
            options.append(self._sequence())
        return options[0] if len(options) == 1 else _Node("choice", parts=tuple(options))

    def _sequence(self) -> _Node:
        items: list[_Node] = []
        while self._kind not in (None, "rule", "|", ")"):
            items.append(self._repeated(self._item()))
        return items[0] if len(items) == 1 else _Node("sequence", parts=tuple(items))

    def _item(self) -> _Node:
        match self._kind:
            case "string":
                return _Node("text", json.dumps("".join(map(_char, _CHAR.findall(self._take()[1:-1]))), ensure_ascii=False))
            case "class":
                return _Node("text", _class(self._take()[1:-1]))
            case "name":
                return _Node("rule", self._take())
            case ".":
                self._at += 1
                return _Node("text", "/(?s:.)/")
            case "(":
                return self._group()
        raise self._expected(_UNFINISHED.get(self._kind or "", "a string, a class, a group or a rule"))

    def _group(self) -> _Node:
        self._at += 1
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _error(f"groups nest more than {MAX_DEPTH} deep")
        body = self._choice()
        if self._kind != ")":
            raise self._expected("')'")
        self._at += 1
        self._depth -= 1
        return body

    def _repeated(self, item: _Node) -> _Node:
        """The item with what says how often it comes; several such marks apply one after the other."""
        for _ in range(MAX_DEPTH):
            if self._kind not in ("*", "+", "?", "count", "{"):
                return item
            item = _Node("repeat", self._count() if self._kind in ("count", "{") else self._take(), (item,))
        raise _error(f"more than {MAX_DEPTH} repetitions of one item")

    def _count(self) -> str:
        count = _COUNT.fullmatch(self._tokens[self._at][0])
        if count is None or not (count[1] or count[3]) or (count[3] and not count[2]):
            raise self._expected("a count: {n}, {n,}, {,m} or {n,m}")
        if max(len(count[1]), len(count[3])) > _MAX_DIGITS:
            raise _error(f"the count {count[0]:.40} is too large")
        self._at += 1
        low, high = int(count[1] or 0), int(count[3]) if count[3] else None if count[2] else int(count[1])
        if high is not None and high < low:
            raise _error(f"the count {count[0]} ends before it begins")
        return f"{{{low},{'' if high is None else high}}}"

    def _expected(self, what: str) -> InvalidRequestError:
        if self._kind is None:
            return _error(f"expected {what}, found the end")
        start = self._tokens[self._at].start()
        line = self._text.count("\n", 0, start) + 1
        return _error(f"line {line}: expected {what}, found {self._text[start : start + 20]!r}")


# Marks that begin something whose end is not there.
_UNFINISHED = {'"': "the end of a string", "[": "the end of a class"}


def _class(body: str) -> str:
    """What stands between brackets, as a regular expression of one character."""
    inner = body.removeprefix("^")
    parts = []
    for start, end in _RANGE.findall(inner):
        first, last = _char(start), _char(end or start)
        if last < first:
            raise _error(f"the range {first}-{last} ends before it begins")
        parts.append(_code(first) if first == last else f"{_code(first)}-{_code(last)}")
    if not parts:
        return "/(?s:.)/" if body else "/[^\\s\\S]/"
    return f"/[{'^' * (inner != body)}{''.join(parts)}]/"


def _char(text: str) -> str:
    """A character as it is written, maybe as an escape."""
    if not text.startswith("\\"):
        return text
    escaped = text[1]
    if len(text) > 2:
        number = int(text[2:], 16)
        if number > 0x10FFFF or 0xD800 <= number < 0xE000:
            raise _error(f"{text} is no character")
        return chr(number)
    if escaped not in _SIMPLE_ESCAPES and escaped.isalnum():
        raise _error(f"unknown escape {text}")
    return _SIMPLE_ESCAPES.get(escaped, escaped)


def _code(char: str) -> str:
    """A character as a regular expression's class takes it."""
    return char if char.isalnum() and char.isascii() else f"\\x{{{ord(char):x}}}"


def _references(node: _Node) -> Iterator[str]:
    if node.kind == "rule":
        yield node.value
    for part in node.parts:
        yield from _references(part)


class _Writer:
    def __init__(self, rules: dict[str, _Node]):
        self._rules = rules
        self._regular = _regular_rules(rules)
        # Terminals are upper case, rules lower case.
        self._names = {name: f"T{i}" if name in self._regular else f"r{i}" for i, name in enumerate(rules)}
        self._terminals: dict[str, str] = {}

    def lark(self) -> str:
        bodies = {name: (self._terminal if name in self._regular else self._rule)(self._rules[name]) for name in _reachable(self._rules)}
        lines = [f"{self._names[name]}: {body}" for name, body in bodies.items()]
        lines += [f"{name}: {body}" for body, name in self._terminals.items()]
        return "\n".join([f"start: {self._names['root']}", *lines, ""])

    def _is_regular(self, node: _Node) -> bool:
        return all(name in self._regular for name in _references(node))

    def _terminal(self, node: _Node) -> str:
        """A regular expression over strings, classes and other terminals."""
        if node.kind == "text":
            return node.value
        if node.kind == "sequence":
            return " ".join(_grouped(part, self._terminal) for part in node.parts) or '""'
        return self._written(node, self._terminal)

    def _rule(self, node: _Node) -> str:
        if self._is_regular(node):
            return self._named(node)
        if node.kind != "sequence":
            return self._written(node, self._rule)
        parts: list[str] = []
        for is_regular, run in groupby(node.parts, self._is_regular):
            items = tuple(run)
            if is_regular:
                parts.append(self._named(items[0] if len(items) == 1 else _Node("sequence", parts=items)))
            else:
                parts += [_grouped(item, self._rule) for item in items]
        return " ".join(parts)

    def _written(self, node: _Node, write: Callable[[_Node], str]) -> str:
        if node.kind == "rule":
            return self._names[node.value]
        if node.kind == "repeat":
            return f"({write(node.parts[0])}){node.value}"
        return " | ".join(map(write, node.parts))

    def _named(self, node: _Node) -> str:
        """A regular expression inside a rule: a terminal of its own, unless it is one already."""
        body = self._terminal(node)
        if node.kind in ("text", "rule") or body == '""':
            return body
        return self._terminals.setdefault(body, f"U{len(self._terminals)}")


def _grouped(node: _Node, write: Callable[[_Node], str]) -> str:
    return f"({write(node)})" if node.kind == "choice" else write(node)


def _reachable(rules: dict[str, _Node]) -> list[str]:
    """Rules that `root` needs, itself first."""
    found = dict.fromkeys(["root"])
    queue = ["root"]
    while queue:
        for name in _references(rules[queue.pop()]):
            if name not in found:
                found[name] = None
                queue.append(name)
    return list(found)


def _regular_rules(rules: dict[str, _Node]) -> set[str]:
    """Rules that reach no rule which reaches itself: those that are left over when rules without open references are taken away."""
    waits_for = {name: set(_references(body)) for name, body in rules.items()}
    users: dict[str, set[str]] = {name: set() for name in rules}
    for name, others in waits_for.items():
        for other in others:
            users[other].add(name)
    ready = [name for name, others in waits_for.items() if not others]
    regular = set(ready)
    while ready:
        done = ready.pop()
        for user in users[done]:
            waits_for[user].discard(done)
            if not waits_for[user] and user not in regular:
                regular.add(user)
                ready.append(user)
    return regular
