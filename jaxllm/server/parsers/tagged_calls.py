"""Calls as a name and tagged values: `<function=f><parameter=a>1</parameter></function>`."""

from __future__ import annotations

from jaxllm.server.parsers.calls import CallReader
from jaxllm.server.parsers.formats import TaggedCalls
from jaxllm.server.parsers.json_writer import JsonWriter, encoded_inside
from jaxllm.server.parsers.schema import typed_json
from jaxllm.server.parsers.source import Malformed, Reading, Source, markers

_MAX_HEADER = 512
# Between the end of a value and what follows it.
_MAX_SPACE = 256
_STRING = frozenset(("string",))
_CDATA, _CDATA_END = "<![CDATA[", "]]>"


def read_tagged_calls(calls: CallReader, form: TaggedCalls) -> Reading[None]:
    """Read one section, its opening marker included; a section may also be a call without it."""
    source, before = calls.source, calls.count
    opened = (yield from source.match(markers(*form.opens))) if form.opens else None
    while True:
        if calls.count > before:
            source.begin_trial()
        yield from source.space()
        if calls.count > before and (yield from source.match(markers(*form.closes))) is not None:
            source.end_trial()
            return
        if form.call_opens and (yield from source.match(markers(*form.call_opens))) is None:
            raise Malformed
        yield from _call(calls, form)
        if opened is None or not form.closes:
            # A call of its own; the end of a section that was never opened is not part of the answer.
            if form.closes:
                yield from calls.close(form.closes)
            return


def _call(calls: CallReader, form: TaggedCalls) -> Reading[None]:
    source = calls.source
    pieces: list[str] = []
    ends = markers(*form.name_ends, *form.name_stops)
    if (yield from source.until(ends, pieces.append, keep=form.name_stops, limit=_MAX_HEADER)) is None:
        raise Malformed
    header = form.header.fullmatch("".join(pieces))
    if header is None:
        raise Malformed
    name = header["name"]
    writer = calls.new_arguments()
    started = False
    nexts = markers(form.key_open, *form.call_closes)
    while True:
        if started:
            source.begin_trial()
        yield from source.space()
        word = yield from source.match(nexts)
        if word is None:
            raise Malformed
        if not started:
            calls.start(name)
            started = True
            writer.open("{")
        if word != form.key_open:
            source.end_trial()
            writer.close()
            calls.end()
            return
        yield from _argument(source, writer, calls, form)


def _argument(source: Source, writer: JsonWriter, calls: CallReader, form: TaggedCalls) -> Reading[None]:
    """Read a key, whose opening tag was read, and its value."""
    pieces: list[str] = []
    if (yield from source.until(markers(form.key_end), pieces.append, limit=_MAX_HEADER)) is None:
        raise Malformed
    key = form.key.fullmatch("".join(pieces))
    if key is None:
        raise Malformed
    if form.value_open:
        yield from source.space()
        yield from source.expect(form.value_open)
    source.end_trial()
    types = _types(key.groupdict().get("type"), calls, key["key"], form)
    writer.key(key["key"])
    cdata = form.cdata and (yield from source.match(markers(_CDATA))) is not None
    value = _Value(writer, types, lines=form.value_lines)
    ends = markers(_CDATA_END) if cdata else markers(form.value_close, *form.value_stops)
    follows = markers(form.key_open, *form.call_closes, *form.closes, *form.call_opens)
    while (word := (yield from source.until(ends, value.write, keep=form.value_stops))) is not None:
        # Text may hold what looks like its end: then nothing of the format follows.
        is_end = word != form.value_close or not (types is None or "string" in types)
        if is_end or (yield from source.comes(follows, behind_space=_MAX_SPACE)) is not False:
            break
        value.write(word)
    value.close(cut=word is None)
    if word is None:
        raise Malformed
    if cdata:
        yield from source.space()
        yield from source.match(markers(form.value_close))


def _types(tag: str | None, calls: CallReader, key: str, form: TaggedCalls) -> frozenset[str] | None:
    """What a value may be: as its tag says (the type, or whether it is a string), else as the schema does."""
    types = calls.schemas.types(calls.name, key)
    if tag in ("true", "string"):
        return _STRING
    if tag == "false":
        return types if types is not None and types != _STRING else None
    if tag is not None:
        return frozenset((tag,))
    return types if types is not None or form.untyped_json else _STRING


class _Value:
    """Writes a value while its text comes: a string at once, of another type when it is whole.

    With `lines`, a line break at either end is not part of it.
    """

    def __init__(self, writer: JsonWriter, types: frozenset[str] | None, *, lines: bool):
        self._writer = writer
        self._types = types
        self._lines = lines
        self._begun = False
        self._held = ""
        self._pieces: list[str] = []
        if types == _STRING:
            writer.open_string()

    def write(self, text: str) -> None:
        if self._lines:
            text = self._held + (text if self._begun else text.removeprefix("\n"))
            self._begun = True
            self._held = text[len(text.removesuffix("\n")) :]
            text = text.removesuffix("\n")
        if self._types != _STRING:
            self._pieces.append(text)
        elif text:
            self._writer.string_piece(encoded_inside(text))

    def close(self, *, cut: bool) -> None:
        """The value ends; `cut`: the output does so before it."""
        if self._types != _STRING:
            self._writer.value(typed_json("".join(self._pieces), self._types))
        elif not cut:
            self._writer.close_string()
