"""GBNF, the EBNF dialect of llama.cpp's grammars, to llguidance's Lark dialect.

    root ::= "yes" | "no " reason{1,3}     # strings, classes, groups, *, +, ?, {m,n}, rules; newlines count as spaces

Rules that do not recurse describe regular languages. They, and every run of regular items elsewhere, become terminals: llguidance's lexer
takes the longest match of a terminal, and so a terminal matches exactly what the grammar says only if nothing is cut out of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from jaxllm.errors import InvalidRequestError

MAX_DEPTH = 64

_RULE = re.compile(r"(?m)^\s*[A-Za-z_][\w-]*\s*::=")
_SPACE = re.compile(r"(?:\s|#[^\n]*)*")
_NAME = re.compile(r"[A-Za-z_][\w-]*")
_DEFINES = re.compile(r"(?:\s|#[^\n]*)*::=")
_COUNT = re.compile(r"\{\s*(\d*)\s*(,?)\s*(\d*)\s*\}")
_ESCAPE = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})")
_MAX_DIGITS = 6
_SIMPLE_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}


@dataclass(frozen=True)
class _Text:
    """A string, or a class of characters as a regular expression."""

    lark: str


@dataclass(frozen=True)
class _Rule:
    name: str


@dataclass(frozen=True)
class _Repeat:
    item: _Node
    suffix: str


@dataclass(frozen=True)
class _Sequence:
    items: tuple[_Node, ...]


@dataclass(frozen=True)
class _Choice:
    options: tuple[_Node, ...]


_Node = _Text | _Rule | _Repeat | _Sequence | _Choice


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
    for name, body in rules.items():
        for other in _references(body):
            if other not in rules:
                raise _error(f"rule {name!r} refers to {other!r}, which is not defined")
    return _Writer(rules).lark()


def _error(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"structured_outputs.grammar is no valid GBNF: {reason}", param="structured_outputs")


class _Parser:
    """Recursive descent; groups nest at most MAX_DEPTH deep."""

    def __init__(self, text: str):
        self._text = text
        self._at = 0
        self._depth = 0

    def rules(self) -> dict[str, _Node]:
        rules: dict[str, _Node] = {}
        self._skip()
        while self._at < len(self._text):
            name = self._take(_NAME)
            if name is None or self._take(_DEFINES) is None:
                raise self._expected("a rule, as in name ::= ...")
            if name in rules:
                raise _error(f"rule {name!r} is defined twice")
            rules[name] = self._choice()
            if self._peek() == ")":
                raise self._expected("no ')' without '('")
        return rules

    def _choice(self) -> _Node:
        options = [self._sequence()]
        while self._peek() == "|":
            self._at += 1
            options.append(self._sequence())
        return options[0] if len(options) == 1 else _Choice(tuple(options))

    def _sequence(self) -> _Node:
        items: list[_Node] = []
        self._skip()
        while (char := self._peek()) and char not in "|)":
            name = _NAME.match(self._text, self._at)
            if name is not None and _DEFINES.match(self._text, name.end()):
                break
            items.append(self._repeated(self._item(char)))
            self._skip()
        return items[0] if len(items) == 1 else _Sequence(tuple(items))

    def _item(self, char: str) -> _Node:
        if char == '"':
            return self._string()
        if char == "[":
            return self._class()
        if char == "(":
            return self._group()
        if char == ".":
            self._at += 1
            return _Text("/(?s:.)/")
        name = self._take(_NAME)
        if name is None:
            raise self._expected("a string, a class, a group or a rule")
        return _Rule(name)

    def _group(self) -> _Node:
        self._at += 1
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _error(f"groups nest more than {MAX_DEPTH} deep")
        body = self._choice()
        if self._peek() != ")":
            raise self._expected("')'")
        self._at += 1
        self._depth -= 1
        return body

    def _repeated(self, item: _Node) -> _Node:
        """The item with what says how often it comes; several such marks apply one after the other."""
        for _ in range(MAX_DEPTH):
            self._skip()
            char = self._peek()
            if char and char in "*+?":
                self._at += 1
                item = _Repeat(item, char)
            elif char == "{":
                item = _Repeat(item, self._count())
            else:
                return item
        raise _error(f"more than {MAX_DEPTH} repetitions of one item")

    def _count(self) -> str:
        count = _COUNT.match(self._text, self._at)
        if count is None or not (count[1] or count[3]) or (count[3] and not count[2]):
            raise self._expected("a count: {n}, {n,}, {,m} or {n,m}")
        if max(len(count[1]), len(count[3])) > _MAX_DIGITS:
            raise _error(f"the count {count[0]:.40} is too large")
        self._at = count.end()
        low, high = int(count[1] or 0), int(count[3]) if count[3] else None if count[2] else int(count[1])
        if high is not None and high < low:
            raise _error(f"the count {count[0]} ends before it begins")
        return f"{{{low},{'' if high is None else high}}}"

    def _string(self) -> _Node:
        self._at += 1
        chars = []
        while (char := self._peek()) != '"':
            if not char or char == "\n":
                raise self._expected("the end of a string")
            chars.append(self._char())
        self._at += 1
        return _Text(json.dumps("".join(chars), ensure_ascii=False))

    def _class(self) -> _Node:
        self._at += 1
        negated = self._peek() == "^"
        self._at += negated
        parts = []
        while (char := self._peek()) != "]":
            if not char:
                raise self._expected("the end of a class")
            first = last = self._char()
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                last = self._char()
            if last < first:
                raise _error(f"the range {first}-{last} ends before it begins")
            parts.append(_code(first) if first == last else f"{_code(first)}-{_code(last)}")
        self._at += 1
        if not parts:
            return _Text("/(?s:.)/") if negated else _Text("/[^\\s\\S]/")
        return _Text(f"/[{'^' * negated}{''.join(parts)}]/")

    def _char(self) -> str:
        char = self._text[self._at]
        self._at += 1
        if char != "\\":
            return char
        code = _ESCAPE.match(self._text, self._at)
        if code is not None:
            self._at = code.end()
            number = int(code[1] or code[2] or code[3], 16)
            if number > 0x10FFFF or 0xD800 <= number < 0xE000:
                raise _error(f"\\{code[0]} is no character")
            return chr(number)
        escaped = self._peek()
        self._at += 1
        if escaped in _SIMPLE_ESCAPES:
            return _SIMPLE_ESCAPES[escaped]
        if escaped and not escaped.isalnum():
            return escaped
        raise _error(f"unknown escape \\{escaped}")

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _skip(self) -> None:
        space = _SPACE.match(self._text, self._at)
        assert space is not None
        self._at = space.end()

    def _take(self, pattern: re.Pattern[str]) -> str | None:
        found = pattern.match(self._text, self._at)
        if found is None:
            return None
        self._at = found.end()
        return found[0]

    def _expected(self, what: str) -> InvalidRequestError:
        line = self._text.count("\n", 0, self._at) + 1
        found = self._text[self._at : self._at + 20]
        return _error(f"line {line}: expected {what}, found {found!r}" if found else f"expected {what}, found the end")


def _code(char: str) -> str:
    """A character as a regular expression's class takes it."""
    return char if char.isalnum() and char.isascii() else f"\\x{{{ord(char):x}}}"


def _references(node: _Node) -> Iterator[str]:
    if isinstance(node, _Rule):
        yield node.name
    elif isinstance(node, _Repeat):
        yield from _references(node.item)
    elif isinstance(node, _Sequence | _Choice):
        for part in node.items if isinstance(node, _Sequence) else node.options:
            yield from _references(part)


class _Writer:
    def __init__(self, rules: dict[str, _Node]):
        self._rules = rules
        self._regular = _regular_rules(rules)
        # Terminals are upper case, rules lower case.
        self._names = {name: f"T{i}" if name in self._regular else f"r{i}" for i, name in enumerate(rules)}
        self._terminals: dict[str, str] = {}

    def lark(self) -> str:
        lines = [f"{self._names[name]}: {self._body(name)}" for name in _reachable(self._rules)]
        lines += [f"{name}: {body}" for body, name in self._terminals.items()]
        return "\n".join([f"start: {self._names['root']}", *lines, ""])

    def _body(self, name: str) -> str:
        return self._terminal(self._rules[name]) if name in self._regular else self._rule(self._rules[name])

    def _is_regular(self, node: _Node) -> bool:
        return all(name in self._regular for name in _references(node))

    def _terminal(self, node: _Node) -> str:
        """A regular expression over strings, classes and other terminals."""
        if isinstance(node, _Text):
            return node.lark
        if isinstance(node, _Rule):
            return self._names[node.name]
        if isinstance(node, _Repeat):
            return f"({self._terminal(node.item)}){node.suffix}"
        if isinstance(node, _Sequence):
            return (
                " ".join(f"({self._terminal(item)})" if isinstance(item, _Choice) else self._terminal(item) for item in node.items) or '""'
            )
        return " | ".join(self._terminal(option) for option in node.options)

    def _rule(self, node: _Node) -> str:
        if self._is_regular(node):
            return self._named(node)
        if isinstance(node, _Rule):
            return self._names[node.name]
        if isinstance(node, _Repeat):
            return f"({self._rule(node.item)}){node.suffix}"
        if isinstance(node, _Choice):
            return " | ".join(self._rule(option) for option in node.options)
        assert isinstance(node, _Sequence)
        parts: list[str] = []
        run: list[_Node] = []
        for item in node.items:
            if self._is_regular(item):
                run.append(item)
                continue
            parts += self._run(run)
            run = []
            parts.append(f"({self._rule(item)})" if isinstance(item, _Choice) else self._rule(item))
        return " ".join(parts + self._run(run))

    def _run(self, items: list[_Node]) -> list[str]:
        return [self._named(_Sequence(tuple(items)) if len(items) > 1 else items[0])] if items else []

    def _named(self, node: _Node) -> str:
        """A regular expression inside a rule: a terminal of its own, unless it is one already."""
        body = self._terminal(node)
        if isinstance(node, _Text | _Rule) or body == '""':
            return body
        return self._terminals.setdefault(body, f"U{len(self._terminals)}")


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
