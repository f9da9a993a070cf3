"""Calls as JSON objects: `{"name": "f", "arguments": {"a": 1}}`, alone, one after another, or in a list."""

from __future__ import annotations

import re

from jaxllm.server.parsers.calls import CallReader
from jaxllm.server.parsers.formats import JsonCalls
from jaxllm.server.parsers.json_writer import JsonWriter
from jaxllm.server.parsers.literals import JSON, json_of, read_text, read_value
from jaxllm.server.parsers.source import Malformed, Reading, markers

_MAX_SEPARATORS = 64


def read_json_calls(calls: CallReader, form: JsonCalls) -> Reading[None]:
    """Read one section, its opening marker included."""
    yield from calls.source.match(markers(*form.opens))
    yield from read_json_section(calls, form)


def read_json_section(calls: CallReader, form: JsonCalls) -> Reading[None]:
    """Read what follows the marker that opens a section."""
    source = calls.source
    yield from source.space()
    char = yield from source.peek()
    if char == "[":
        source.take(1)
        yield from _list(calls, form)
    elif char == "{":
        yield from _objects(calls, form)
    else:
        raise Malformed
    yield from calls.close(form.closes)


def _objects(calls: CallReader, form: JsonCalls) -> Reading[None]:
    source = calls.source
    separators = re.compile(rf"[\s{re.escape(form.separators)}]*") if form.separators else None
    yield from _object(calls, form)
    while separators is not None:
        source.begin_trial()
        yield from source.run(separators, _MAX_SEPARATORS)
        if (yield from source.peek()) != "{":
            raise Malformed
        yield from _object(calls, form)


def _list(calls: CallReader, form: JsonCalls) -> Reading[None]:
    source, before = calls.source, calls.count
    while True:
        yield from source.space()
        char = yield from source.peek()
        if char == "]":
            source.take(1)
            break
        if char == ",":
            source.take(1)
            continue
        if calls.count > before:
            source.begin_trial()
        if char == "{":
            yield from _object(calls, form)
        else:
            # Not a call; beside calls, it is none of the answer either.
            yield from read_value(source, JsonWriter(), JSON)
            if calls.count > before:
                source.end_trial()
    if calls.count == before:
        raise Malformed


def _object(calls: CallReader, form: JsonCalls) -> Reading[None]:
    source = calls.source
    writer = calls.new_arguments()
    name: str | None = None
    call_id: str | None = None
    seen_arguments = started = False
    yield from source.expect("{")
    while True:
        yield from source.space()
        char = yield from source.peek()
        if char == "}":
            source.take(1)
            break
        if char == ",":
            source.take(1)
            continue
        if started and char not in JSON.quotes:
            # A brace is missing, or something follows the arguments: they are whole nevertheless.
            break
        key = yield from read_text(source)
        yield from source.space()
        yield from source.expect(":")
        yield from source.space()
        if form.name_is_key and name is None:
            name, key = key, form.arguments[0]
        if key in form.names and name is None:
            name = yield from read_text(source)
        elif key in form.arguments and not seen_arguments:
            seen_arguments = True
            if name is not None and not (form.id_may_follow and call_id is None) and (yield from source.peek()) == "{":
                calls.start(name, call_id)
                started = True
            yield from read_arguments(calls, writer)
        elif key in form.ids and not started:
            call_id = yield from _scalar_text(calls)
        elif form.strict and key != "type":
            raise Malformed
        else:
            yield from read_value(source, JsonWriter(), JSON)
    if not started:
        if name is None or (form.strict and not seen_arguments):
            raise Malformed
        calls.start(name, call_id)
    calls.end()


def read_arguments(calls: CallReader, writer: JsonWriter) -> Reading[None]:
    """Read the arguments: an object, an object in a string, or nothing at all."""
    source = calls.source
    char = yield from source.peek()
    if char == "{":
        yield from read_value(source, writer, JSON)
    elif char and char in JSON.quotes:
        value = json_of((yield from read_text(source)) or "{}")
        if value is None or value[0] != "{":
            raise Malformed
        writer.value(value)
    else:
        out = JsonWriter()
        yield from read_value(source, out, JSON)
        if out.drain() != "null":
            raise Malformed
        writer.value("{}")


def _scalar_text(calls: CallReader) -> Reading[str | None]:
    """An id: a string, or another value as it is written."""
    if ((yield from calls.source.peek()) or " ") in JSON.quotes:
        return (yield from read_text(calls.source))
    out = JsonWriter()
    yield from read_value(calls.source, out, JSON)
    text = out.drain()
    return None if text == "null" else text
