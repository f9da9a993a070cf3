"""Values as models write them, read piece by piece and written as JSON: JSON itself, Python literals, Gemma's notation.

What is nearly right is put right: raw line breaks in strings, trailing commas, Python's words in JSON, unescaped quotes inside of
Python strings where it is clear that the string goes on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from jaxllm.server.parsers.json_writer import JsonWriter, encoded, encoded_inside
from jaxllm.server.parsers.source import Malformed, Markers, Reading, Source, markers

MAX_DEPTH = 128
_MAX_ATOM = 512
_MAX_KEY = 4096

_ATOM = re.compile(r"[A-Za-z0-9_.+\-]*")
_BARE_TEXT = re.compile(r"[^,\[\]{}]*")
_KEY = re.compile(r"[A-Za-z0-9_.\-$]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_LOOSE_NUMBER = re.compile(r"[+-]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_HEX = re.compile(r"[0-9a-fA-F]+")
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_SPANS = {quote: re.compile(rf"[^{quote}\\]+") for quote in "\"'"}
_SHORT_ESCAPES = {"a": "\a", "v": "\v", "0": "\0", "'": "'", "\n": ""}
# A quote that ends a string is followed by one of these, behind a little white space.
_LOOSE_END_SPACE = 16
_LOOSE_END = re.compile(rf"\s{{0,{_LOOSE_END_SPACE}}}")
_AFTER_STRING = ",)]}:"


@dataclass(frozen=True)
class Dialect:
    """How a language writes values.

    `quotes` are the characters that may hold a string, `string_marker` a word that stands at both ends of one;
    with `loose_quotes` a quote inside of a string need not be escaped.
    """

    quotes: str = '"'
    string_marker: str | None = None
    loose_quotes: bool = False
    tuples: bool = False
    bare_keys: bool = False
    bare_strings: bool = False
    # A word without quotes is a string.
    bare_words: bool = False


# Strings in single quotes are no JSON, but nothing else can be meant.
JSON = Dialect(quotes="\"'")
PYTHON = Dialect(quotes="\"'", loose_quotes=True, tuples=True)
PYTHON_CALL = replace(PYTHON, bare_words=True)
GEMMA4 = Dialect(string_marker='<|"|>', bare_keys=True, bare_strings=True)
FUNCTION_GEMMA = Dialect(string_marker="<escape>", bare_keys=True, bare_strings=True)


def read_value(source: Source, out: JsonWriter, dialect: Dialect) -> Reading[None]:
    """Read one value and write it as JSON while it comes.

    Raises:
        Malformed: at the first character that no value of the dialect can have there; `out` holds what came before.
    """
    floor = out.depth
    while True:
        fresh = yield from _begin_value(source, out, dialect)
        while out.depth > floor:
            yield from source.space()
            char = yield from source.peek()
            if not fresh and char == ",":
                source.take(1)
                yield from source.space()
                char = yield from source.peek()
            elif not fresh and not _closes(char, out.innermost, dialect):
                raise Malformed
            if _closes(char, out.innermost, dialect):
                source.take(1)
                out.close()
                fresh = False
                continue
            if out.innermost == "{":
                yield from _key(source, out, dialect)
            break
        else:
            return


def json_of(text: str, dialect: Dialect = JSON) -> str | None:
    """JSON of a text that is one value and nothing else; None where it is not."""
    source, out = Source(), JsonWriter()
    source.feed(text.strip())
    source.ended = True
    try:
        for _ in read_value(source, out, dialect):
            return None
    except Malformed:
        return None
    return out.drain() if source.pos == len(source.text) else None


def read_text(source: Source, dialect: Dialect = JSON) -> Reading[str]:
    """Read one string.

    Raises:
        Malformed: something else comes, or the string does not end.
    """
    out = JsonWriter()
    char = yield from source.peek()
    if not char or char not in dialect.quotes:
        raise Malformed
    yield from _quoted(source, out, dialect, source.take(1))
    return str(json.loads(out.drain()))


def read_word(source: Source, characters: re.Pattern[str], limit: int = 256) -> Reading[str]:
    """Read a name: a non-empty run of the characters.

    Raises:
        Malformed: there is none, or it is too long.
    """
    word = yield from source.run(characters, limit)
    if not word:
        raise Malformed
    return word


def _closes(char: str, bracket: str, dialect: Dialect) -> bool:
    return char == "}" if bracket == "{" else char == "]" or (char == ")" and dialect.tuples)


def _begin_value(source: Source, out: JsonWriter, dialect: Dialect) -> Reading[bool]:
    """Read a whole scalar, or the bracket that opens a container (then True)."""
    yield from source.space()
    if dialect.string_marker is not None and (yield from source.match(markers(dialect.string_marker))):
        out.open_string()
        yield from _marked(source, out.string_piece, markers(dialect.string_marker))
        out.close_string()
        return False
    char = yield from source.peek()
    if char == "{" or char == "[" or (char == "(" and dialect.tuples):
        if out.depth >= MAX_DEPTH:
            raise Malformed
        source.take(1)
        out.open("{" if char == "{" else "[")
        return True
    if char and char in dialect.quotes:
        yield from _quoted(source, out, dialect, source.take(1))
        return False
    if dialect.bare_strings:
        text = (yield from _ahead(source, _BARE_TEXT)).strip()
        value = _atom(text) or (encoded(text) if text else None)
    else:
        text = yield from _ahead(source, _ATOM)
        value = _atom(text) or (encoded(text) if text and dialect.bare_words else None)
    if value is None:
        raise Malformed
    yield from source.run(_BARE_TEXT if dialect.bare_strings else _ATOM, _MAX_ATOM)
    out.value(value)
    return False


def _ahead(source: Source, characters: re.Pattern[str]) -> Reading[str]:
    """The run of characters that comes next, not read."""
    while True:
        found = characters.match(source.text, source.pos)
        assert found is not None
        if len(found.group()) > _MAX_ATOM:
            raise Malformed
        if found.end() < len(source.text) or source.ended:
            return found.group()
        yield


def _atom(text: str) -> str | None:
    """JSON of a word or a number; None where it is neither."""
    if text in _WORDS:
        return _WORDS[text]
    if _NUMBER.fullmatch(text):
        return text
    if not _LOOSE_NUMBER.fullmatch(text):
        return None
    sign, digits = ("-" if text[0] == "-" else ""), text.lstrip("+-").replace("_", "")
    whole, dot, rest = digits.partition(".")
    number = sign + (whole.lstrip("0") or "0") if dot else sign + (re.sub(r"^0+(?=[0-9])", "", digits))
    if dot:
        number += "." + (rest if rest[:1].isdigit() else "0" + rest)
    return number if _NUMBER.fullmatch(number) else None


def _key(source: Source, out: JsonWriter, dialect: Dialect) -> Reading[None]:
    if dialect.string_marker is not None and (yield from source.match(markers(dialect.string_marker))):
        pieces: list[str] = []
        yield from _marked(source, pieces.append, markers(dialect.string_marker))
        name = str(json.loads('"' + "".join(pieces) + '"'))
    else:
        char = yield from source.peek()
        if char and char in dialect.quotes:
            name = yield from read_text(source, dialect)
        elif dialect.bare_keys:
            name = yield from read_word(source, _KEY)
        else:
            raise Malformed
    yield from source.space()
    yield from source.expect(":")
    out.key(name)


def _marked(source: Source, emit: Callable[[str], None], marker: Markers) -> Reading[None]:
    """Read the text of a string up to its end marker."""
    if (yield from source.until(marker, lambda text: emit(encoded_inside(text)))) is None:
        raise Malformed


def _quoted(source: Source, out: JsonWriter, dialect: Dialect, quote: str) -> Reading[None]:
    """Read a string behind its opening quote, up to and with its end."""
    out.open_string()
    span = _SPANS[quote]
    while True:
        char = yield from source.peek()
        if not char:
            raise Malformed
        if char == "\\":
            out.string_piece((yield from _escape(source, python=dialect.tuples)))
        elif char == quote:
            if not dialect.loose_quotes or (yield from _ends_string(source)):
                source.take(1)
                out.close_string()
                return
            out.string_piece(encoded_inside(source.take(1)))
        else:
            found = span.match(source.text, source.pos)
            assert found is not None
            out.string_piece(encoded_inside(source.take(found.end() - source.pos)))


def _ends_string(source: Source) -> Reading[bool]:
    """Whether the quote that comes next ends its string, seen by what follows it."""
    while True:
        found = _LOOSE_END.match(source.text, source.pos + 1)
        assert found is not None
        if found.end() < len(source.text):
            return source.text[found.end()] in _AFTER_STRING
        if source.ended:
            return True
        if found.end() - source.pos > _LOOSE_END_SPACE:
            return False
        yield


def _escape(source: Source, *, python: bool) -> Reading[str]:
    """Read an escape sequence; one that means nothing stands for itself."""
    if not (yield from source.available(2)):
        raise Malformed
    kind = source.text[source.pos + 1]
    if kind in '"\\/bfnrt':
        return source.take(2)
    digits = {"u": 4, "x": 2, "U": 8}.get(kind if python else "u" if kind == "u" else "", 0)
    if digits:
        yield from source.available(2 + digits)
        code = source.text[source.pos + 2 : source.pos + 2 + digits]
        if len(code) == digits and _HEX.fullmatch(code) and int(code, 16) < 0x110000:
            text = source.take(2 + digits)
            return text if kind == "u" else json.dumps(chr(int(code, 16)))[1:-1]
    elif kind in _SHORT_ESCAPES and (python or kind == "'"):
        source.take(2)
        return encoded_inside(_SHORT_ESCAPES[kind])
    source.take(1)
    return "\\\\"
