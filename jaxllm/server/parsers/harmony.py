"""OpenAI's harmony: messages with a channel and a recipient in a header, `<|channel|>analysis<|message|>text<|end|>`.

The prompt ends inside of the first header. Messages to functions are calls, those on the channel "analysis" are reasoning, all others
are the answer. A message to a tool that is no function of the request (`python`, `browser`) is for nobody here, and is left out.
"""

from __future__ import annotations

import re

from jaxllm.server.parsers.calls import CallReader
from jaxllm.server.parsers.channel import Channel
from jaxllm.server.parsers.header_calls import MAX_HEADER
from jaxllm.server.parsers.json_calls import read_arguments
from jaxllm.server.parsers.source import Malformed, Reading, Source, markers

_HEADER = markers("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_BODY = markers("<|start|>", "<|channel|>", "<|end|>", "<|call|>", "<|return|>")
_NEXT_HEADER = ("<|start|>", "<|channel|>")
_BEGINNING = markers("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "to=")
_RECIPIENT = re.compile(r"(?:^|\s)to=(\S+)")


class _Header:
    """What a message's header says so far."""

    def __init__(self) -> None:
        self.channel = ""
        self.recipient = ""

    def read(self, text: str, *, channel: bool) -> None:
        """Take the text behind a marker; `channel`: the marker announces one."""
        if channel:
            self.channel = text.split()[0] if text.split() else ""
        found = _RECIPIENT.search(text)
        if found is not None:
            self.recipient = found[1]


def read_harmony(source: Source, calls: CallReader, content: Channel, reasoning: Channel, *, reads_calls: bool) -> Reading[None]:
    """Read a whole output; without `reads_calls`, messages to functions are part of the answer."""
    space = yield from source.space()
    if not (yield from source.comes(_BEGINNING)):
        # No header: all of it is the answer.
        content.write(space)
        yield from _body(source, content)
    while True:
        header = yield from _read_header(source, content)
        if header is None:
            return
        function = _function(header, calls)
        if function is not None and reads_calls:
            yield from _call(source, calls, content, function)
        elif function is None and header.channel == "analysis":
            yield from _body(source, reasoning)
        elif function is None and header.recipient and header.recipient != "assistant":
            yield from source.until(_BODY, lambda _: None, keep=_NEXT_HEADER)
        else:
            yield from _body(source, content)


def _body(source: Source, channel: Channel) -> Reading[None]:
    """Read a message's text; messages of one channel are lines of it."""
    if channel.begun:
        channel.write("\n")
    channel.active = True
    yield from source.until(_BODY, channel.write, keep=_NEXT_HEADER)
    channel.active = False


def _read_header(source: Source, content: Channel) -> Reading[_Header | None]:
    """Read up to the message; None where the text ends before. What is too long for a header is the answer's."""
    header = _Header()
    marker: str | None = ""
    while True:
        pieces: list[str] = []
        source.begin_trial()
        try:
            word = yield from source.until(_HEADER, pieces.append, limit=MAX_HEADER)
        except Malformed:
            content.write(source.end_trial())
            yield from source.until(_HEADER, content.write, keep=_HEADER.words)
            continue
        source.end_trial()
        header.read("".join(pieces), channel=marker == "<|channel|>")
        if word is None:
            return None
        if word == "<|message|>":
            return header
        if word == "<|start|>":
            header = _Header()
        marker = word


def _function(header: _Header, calls: CallReader) -> str | None:
    """The function that a message calls, if it does."""
    name = header.recipient.removeprefix("functions.")
    return name if name and (name != header.recipient or name in calls.schemas) else None


def _call(source: Source, calls: CallReader, content: Channel, name: str) -> Reading[None]:
    """Read a call's arguments; what follows them in the message, or is none, goes to the answer."""
    writer = calls.new_arguments()
    source.begin_trial()
    try:
        yield from source.space()
        char = yield from source.peek()
        if char in ("{", "<"):
            calls.start(name)
        if char != "<":
            yield from read_arguments(calls, writer)
            if not calls.running:
                calls.start(name)
        calls.end()
    except Malformed:
        calls.give_up()
    failed = source.end_trial()
    content.at_marker()
    content.write(failed)
    yield from source.until(_BODY, content.write, keep=_NEXT_HEADER)
