"""Calls as a header and an object: `functions.f:0<|argument|>{"a": 1}`."""

from __future__ import annotations

from jaxllm.server.parsers.calls import CallReader
from jaxllm.server.parsers.formats import HeaderCalls
from jaxllm.server.parsers.json_calls import read_json_section
from jaxllm.server.parsers.literals import read_value
from jaxllm.server.parsers.source import Malformed, Reading, markers

MAX_HEADER = 512
# A list of objects, and not a marker in brackets.
_LIST = markers("[{", "[ ", "[\n", "[\r", "[\t")


def read_header_calls(calls: CallReader, form: HeaderCalls) -> Reading[None]:
    """Read one section, its opening marker included."""
    source = calls.source
    ends = markers(*form.header_ends, *form.header_stops)
    closers = markers(*form.call_closes)
    yield from source.match(markers(*form.opens))
    if form.listed is not None and (yield from source.comes(_LIST, behind_space=MAX_HEADER)):
        yield from read_json_section(calls, form.listed)
        return
    while True:
        yield from source.space()
        yield from source.match(markers(*form.call_opens))
        pieces: list[str] = []
        if (yield from source.until(ends, pieces.append, keep=form.header_stops, limit=MAX_HEADER)) is None:
            raise Malformed
        header = form.header.fullmatch("".join(pieces))
        if header is None:
            raise Malformed
        yield from source.space()
        if (yield from source.peek()) != "{":
            raise Malformed
        groups = header.groupdict()
        writer = calls.new_arguments()
        calls.start(groups["name"], groups.get("id"))
        yield from read_value(source, writer, form.dialect)
        calls.end()
        if not form.closes and not form.call_closes:
            return
        source.begin_trial()
        yield from source.space()
        while (yield from source.match(closers)):
            source.begin_trial()
            yield from source.space()
        if (yield from source.match(markers(*form.closes))) is not None or not form.call_opens:
            source.end_trial()
            return
        if not (yield from source.comes(markers(*form.call_opens))):
            raise Malformed
