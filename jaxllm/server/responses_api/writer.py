"""The parts of an answer as items of a response, and as the events that tell of them."""

from __future__ import annotations

import time
import uuid
from typing import Any

from jaxllm.errors import InvalidRequestError
from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.server.answering import Answering
from jaxllm.server.errors import error_body
from jaxllm.server.logprobs import LogprobFormat
from jaxllm.server.parsers import ArgumentsDelta, ContentDelta, Event, ReasoningDelta, ToolCallStart
from jaxllm.server.responses import ChatLogprob, Usage
from jaxllm.server.responses_api.objects import (
    FunctionCallItem,
    IncompleteDetails,
    InputTokensDetails,
    Item,
    ItemStatus,
    OutputMessage,
    OutputText,
    OutputTokensDetails,
    ReasoningItem,
    ReasoningText,
    ResponseError,
    ResponseObject,
    ResponseUsage,
)
from jaxllm.server.streaming import EventWriter


class ResponseWriter(EventWriter):
    """Fills a response with what the engine brings, and collects the events of it where they are wanted.

    Items follow one another: one is closed before the next begins.

    Args:
        response: what the answer is put into.
        events: whether frames of events are made; without, every call returns b"".
    """

    def __init__(self, answering: Answering, response: ResponseObject, *, events: bool):
        super().__init__(events=events)
        self.response = response
        self._answering = answering
        self._sequence = 0
        self._item: Item | None = None
        self._text: list[str] = []
        self._logprobs: list[ChatLogprob] = []
        body = answering.body
        form = LogprobFormat(answering.job.serving.token_texts, top=body.top_logprobs or 0, as_token_ids=False)
        self._form = form if body.logprobs else None

    def open(self) -> bytes:
        """The response begins."""
        self.response.status = "in_progress"
        self._tell_of_response("response.created")
        self._tell_of_response("response.in_progress")
        return self._take_frames()

    def add(self, output: RequestOutput) -> bytes:
        """What an output of the engine brings; its last one ends the response."""
        self._answering.count(output)
        for choice in output.outputs:
            logprobs = self._form.chat(choice.token_ids, choice.logprobs or []).content if self._form is not None else []
            for event in self._answering.read(choice):
                self._part(event, logprobs)
                # What an output says of its tokens is said once.
                logprobs = []
            self._logprobs_only(logprobs)
            if choice.finish_reason is not None:
                self._end(choice)
        return self._take_frames()

    def fail(self, error: BaseException) -> bytes:
        """The response ends with an error; what there is of it stays."""
        code = "invalid_prompt" if isinstance(error, InvalidRequestError) else "server_error"
        self._close("incomplete")
        self.response.status = "failed"
        self.response.error = ResponseError(code, error_body(error).error.message)
        self._tell_of_response("response.failed")
        return self._take_frames()

    def cancel(self) -> None:
        """The response ends because nobody wants it any longer."""
        self._close("incomplete")
        self.response.status = "cancelled"
        self.response.usage = _usage(self._answering.usage())

    # ------------------------------------------------------------------------------------------------------------- items

    def _part(self, event: Event, logprobs: list[ChatLogprob]) -> None:
        match event:
            case ContentDelta():
                item = self._item if isinstance(self._item, OutputMessage) else self._message()
                self._logprobs += logprobs
                self._delta("response.output_text.delta", item, event.text, content_index=0, logprobs=logprobs)
            case ReasoningDelta():
                item = self._item if isinstance(self._item, ReasoningItem) else self._begin(ReasoningItem(id=_id("rs")), ReasoningText())
                self._delta("response.reasoning_text.delta", item, event.text, content_index=0)
            case ToolCallStart():
                self._begin(FunctionCallItem(id=_id("fc"), call_id=event.id or _id("call"), name=event.name))
            case ArgumentsDelta():
                assert isinstance(self._item, FunctionCallItem), "arguments follow the start of their call"
                self._delta("response.function_call_arguments.delta", self._item, event.text)

    def _begin(self, item: Item, part: OutputText | ReasoningText | None = None) -> Item:
        self._close("completed")
        self._item = item
        self.response.output.append(item)
        self._tell("response.output_item.added", output_index=self._index, item=item)
        if part is not None:
            self._tell("response.content_part.added", item_id=item.id, output_index=self._index, content_index=0, part=part)
        return item

    def _message(self) -> Item:
        return self._begin(OutputMessage(id=_id("msg")), OutputText())

    def _delta(self, kind: str, item: Item, text: str, **more: Any) -> None:
        self._text.append(text)
        self._tell(kind, item_id=item.id, output_index=self._index, **more, delta=text)

    def _logprobs_only(self, logprobs: list[ChatLogprob]) -> None:
        """Tokens without text of their own: the end of the sequence, or the first bytes of a character."""
        if logprobs:
            self._part(ContentDelta(""), logprobs)

    def _close(self, status: ItemStatus) -> None:
        """End the open item, with everything that was said of it in deltas."""
        item, self._item = self._item, None
        if item is None:
            return
        text, self._text = "".join(self._text), []
        where: dict[str, Any] = {"item_id": item.id, "output_index": self._index}
        if isinstance(item, OutputMessage):
            part = OutputText(text=text, logprobs=self._logprobs)
            self._logprobs = []
            item.content = [part]
            self._tell("response.output_text.done", **where, content_index=0, text=text, logprobs=part.logprobs)
            self._tell("response.content_part.done", **where, content_index=0, part=part)
        elif isinstance(item, ReasoningItem):
            item.content = [ReasoningText(text=text)]
            self._tell("response.reasoning_text.done", **where, content_index=0, text=text)
            self._tell("response.content_part.done", **where, content_index=0, part=item.content[0])
        else:
            item.arguments = text
            self._tell("response.function_call_arguments.done", **where, name=item.name, arguments=text)
        item.status = status
        self._tell("response.output_item.done", output_index=self._index, item=item)

    def _end(self, choice: CompletionOutput) -> None:
        cut = self._answering.finish_reason(choice) not in ("stop", "tool_calls")
        if not self.response.output:
            # Clients read the text of an answer, even where it is empty.
            self._message()
        self._close("incomplete" if cut else "completed")
        response = self.response
        response.usage = _usage(self._answering.usage())
        if cut:
            response.status = "incomplete"
            response.incomplete_details = IncompleteDetails("max_output_tokens") if choice.finish_reason == "length" else None
        else:
            response.status = "completed"
            response.completed_at = int(time.time())
        self._tell_of_response(f"response.{response.status}")

    # ------------------------------------------------------------------------------------------------------------ events

    @property
    def _index(self) -> int:
        return len(self.response.output) - 1

    def _tell_of_response(self, kind: str) -> None:
        self._tell(kind, response=self.response)

    def _tell(self, kind: str, **fields: Any) -> None:
        super()._tell(kind, sequence_number=self._sequence, **fields)
        self._sequence += 1


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def _usage(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        usage.prompt_tokens,
        InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
        usage.completion_tokens,
        OutputTokensDetails(usage.completion_tokens_details.reasoning_tokens),
        usage.total_tokens,
    )
