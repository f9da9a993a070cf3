"""Calls as Python writes them: `[f(a=1), g(b="x")]`."""

from __future__ import annotations

import re

from jaxllm.server.parsers.calls import CallReader
from jaxllm.server.parsers.formats import PythonCalls
from jaxllm.server.parsers.literals import PYTHON_CALL, read_value, read_word
from jaxllm.server.parsers.source import Malformed, Reading, markers

_NAME = re.compile(r"[A-Za-z0-9_.\-]*")
_KEY = re.compile(r"[A-Za-z0-9_]*")


def read_python_calls(calls: CallReader, form: PythonCalls) -> Reading[None]:
    """Read one section, its opening marker included."""
    source, before = calls.source, calls.count
    yield from source.match(markers(*form.opens))
    yield from source.space()
    listed = (yield from source.peek()) == "["
    if listed:
        source.take(1)
    elif not form.lines:
        raise Malformed
    while True:
        if calls.count > before:
            source.begin_trial()
        yield from source.space()
        if listed and (yield from source.peek()) == "]":
            source.take(1)
            break
        if not listed and (yield from source.match(markers(*form.closes))) is not None:
            break
        if calls.count > before and (yield from source.peek()) in (",", ";"):
            source.take(1)
            yield from source.space()
        yield from _call(calls)
    if calls.count == before:
        raise Malformed
    source.end_trial()
    if listed:
        yield from calls.close(form.closes)


def _call(calls: CallReader) -> Reading[None]:
    source = calls.source
    name = yield from read_word(source, _NAME)
    yield from source.space()
    yield from source.expect("(")
    writer = calls.new_arguments()
    started = False
    while True:
        yield from source.space()
        char = yield from source.peek()
        if char == ")":
            source.take(1)
            break
        if char == "," and started:
            source.take(1)
            continue
        key = yield from read_word(source, _KEY)
        yield from source.space()
        yield from source.expect("=")
        if not started:
            calls.start(name)
            started = True
            writer.open("{")
        writer.key(key)
        yield from read_value(source, writer, PYTHON_CALL)
    if not started:
        calls.start(name)
    calls.end()
