"""Calls as a name and tagged values: `<function=f><parameter=a>1</parameter></function>`."""

from __future__ import annotations

from jaxllm.server.parsers.calls import CallReader
from jaxllm.server.parsers.formats import TaggedCalls
from jaxllm.server.parsers.json_writer import JsonWriter, encoded_inside
from jaxllm.server.parsers.schema import typed_json
from jaxllm.server.parsers.source import Malformed, Reading, Source, markers

_MAX_HEADER = 512
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
    sink = _StringSink(writer) if types == _STRING else _TypedSink(writer, types)
    text = _Lines(sink) if form.value_lines else sink
    ends = markers(_CDATA_END) if cdata else markers(form.value_close, *form.value_stops)
    if (yield from source.until(ends, text.write, keep=form.value_stops)) is None:
        sink.cut()
        raise Malformed
    sink.close()
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


class _StringSink:
    """Writes a string as it comes."""

    def __init__(self, writer: JsonWriter):
        self._writer = writer
        writer.open_string()

    def write(self, text: str) -> None:
        self._writer.string_piece(encoded_inside(text))

    def close(self) -> None:
        self._writer.close_string()

    def cut(self) -> None:
        """The text ended inside of the string."""


class _TypedSink:
    """Writes a value of another type, once it is whole."""

    def __init__(self, writer: JsonWriter, types: frozenset[str] | None):
        self._writer = writer
        self._types = types
        self._pieces: list[str] = []

    def write(self, text: str) -> None:
        self._pieces.append(text)

    def close(self) -> None:
        self._writer.value(typed_json("".join(self._pieces), self._types))

    cut = close


class _Lines:
    """Leaves out one line break at either end."""

    def __init__(self, sink: _StringSink | _TypedSink):
        self._sink = sink
        self._begun = False
        self._held = ""

    def write(self, text: str) -> None:
        if not self._begun:
            self._begun = True
            text = text.removeprefix("\n")
        text = self._held + text
        self._held = "\n" if text.endswith("\n") else ""
        text = text.removesuffix("\n")
        if text:
            self._sink.write(text)
