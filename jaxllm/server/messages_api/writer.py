"""The parts of an answer as blocks of a message, and as the events that tell of them."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.server.answering import Answering
from jaxllm.server.errors import anthropic_error_body
from jaxllm.server.messages_api.objects import Block, MessageObject, MessageUsage, StopReason, TextBlock, ThinkingBlock, ToolUseBlock
from jaxllm.server.parsers import ArgumentsDelta, ContentDelta, Event, ReasoningDelta, ToolCallStart
from jaxllm.server.streaming import EventWriter

_encode = msgspec.json.Encoder().encode


class MessageWriter(EventWriter):
    """Fills a message with what the engine brings, and collects the events of it where they are wanted.

    Blocks follow one another: one is closed before the next begins.

    Args:
        events: whether frames of events are made; without, every call returns b"".
    """

    def __init__(self, answering: Answering, *, events: bool):
        super().__init__(events=events)
        job = answering.job
        self.message = MessageObject(id=job.response_id, model=job.model, usage=MessageUsage(input_tokens=0, output_tokens=0))
        self._answering = answering
        self._opened = False
        self._block: Block | None = None
        self._text: list[str] = []

    def add(self, output: RequestOutput) -> bytes:
        """What an output of the engine brings; the first one opens the message, its last one ends it."""
        self._answering.count(output)
        if not self._opened:
            self._open()
        for choice in output.outputs:
            for event in self._answering.read(choice):
                self._part(event)
            if choice.finish_reason is not None:
                self._end(choice)
        return self._take_frames()

    @staticmethod
    def fail(error: BaseException) -> bytes:
        """The event of a failure behind the first one."""
        return b"event: error\ndata: " + _encode(anthropic_error_body(error)) + b"\n\n"

    def _open(self) -> None:
        self._opened = True
        usage = self._usage()
        usage.output_tokens = 0
        self._tell("message_start", message=msgspec.structs.replace(self.message, content=[], usage=usage))
        self._tell("ping")

    def _part(self, event: Event) -> None:
        match event:
            case ContentDelta():
                if not isinstance(self._block, TextBlock):
                    self._begin(TextBlock())
                self._delta(event.text, {"type": "text_delta", "text": event.text})
            case ReasoningDelta():
                if not isinstance(self._block, ThinkingBlock):
                    self._begin(ThinkingBlock())
                self._delta(event.text, {"type": "thinking_delta", "thinking": event.text})
            case ToolCallStart():
                self._begin(ToolUseBlock(id=event.id or f"toolu_{len(self.message.content)}", name=event.name))
            case ArgumentsDelta():
                self._delta(event.text, {"type": "input_json_delta", "partial_json": event.text})

    def _begin(self, block: Block) -> None:
        self._close()
        self._block = block
        self.message.content.append(block)
        self._tell("content_block_start", index=self._index, content_block=block)

    def _delta(self, text: str, delta: dict[str, str]) -> None:
        self._text.append(text)
        self._tell("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> None:
        """End the open block, with everything that was said of it in deltas."""
        block, self._block = self._block, None
        if block is None:
            return
        text, self._text = "".join(self._text), []
        if isinstance(block, TextBlock):
            block.text = text
        elif isinstance(block, ThinkingBlock):
            block.thinking = text
            # Clients send thinking back only with a signature. Nothing here checks one.
            block.signature = hashlib.sha256(text.encode()).hexdigest()
            self._tell("content_block_delta", index=self._index, delta={"type": "signature_delta", "signature": block.signature})
        else:
            block.input = _arguments(text)
        self._tell("content_block_stop", index=self._index)

    def _end(self, choice: CompletionOutput) -> None:
        if not self.message.content:
            # Clients read the text of an answer, even where it is empty.
            self._begin(TextBlock())
        self._close()
        message = self.message
        message.usage = self._usage()
        message.stop_reason = _stop_reason(choice, self._answering.finish_reason(choice))
        if message.stop_reason == "stop_sequence":
            message.stop_sequence = str(choice.stop_reason)
        self._tell("message_delta", delta={"stop_reason": message.stop_reason, "stop_sequence": message.stop_sequence}, usage=message.usage)
        self._tell("message_stop")

    def _usage(self) -> MessageUsage:
        usage = self._answering.usage()
        cached = usage.prompt_tokens_details.cached_tokens
        return MessageUsage(
            input_tokens=usage.prompt_tokens - cached, cache_read_input_tokens=cached, output_tokens=usage.completion_tokens
        )

    @property
    def _index(self) -> int:
        return len(self.message.content) - 1


def _stop_reason(choice: CompletionOutput, finish_reason: str | None) -> StopReason:
    if finish_reason == "tool_calls":
        return "tool_use"
    if finish_reason == "stop":
        return "stop_sequence" if isinstance(choice.stop_reason, str) else "end_turn"
    return "max_tokens"


def _arguments(text: str) -> dict[str, Any]:
    """The input of a call. What the model left broken or open, where it was cut, is kept as it is under a name that no tool has."""
    try:
        value = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"_unparsed": text}
