"""From the text of a choice to what its message holds: answer, reasoning, tool calls."""

from __future__ import annotations

import random
import string
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxllm.errors import NotSupportedError
from jaxllm.outputs import CompletionOutput
from jaxllm.server.parsers import ArgumentsDelta, Event, OutputParser, ReasoningDelta, ToolCallStart, opens_reasoning
from jaxllm.server.parsers.grammar import PLAIN_CALLS
from jaxllm.server.protocol import ChatCompletionRequest
from jaxllm.server.state import ServerState
from jaxllm.server.structured import structured_outputs, with_calls
from jaxllm.server.tools import tool_choice

if TYPE_CHECKING:
    from jaxllm.server.generating import Prompt
    from jaxllm.text.tokenizer import Tokenizer

_MISTRAL_ID_CHARACTERS = string.ascii_letters + string.digits
_MISTRAL_ID_LENGTH = 9


class AnswerPlan:
    """What of a request's output is to be parsed, and how.

    Raises:
        NotSupportedError: tools are to be called as the model likes, and the server was not started for it.
        InvalidRequestError: the choice of tools or their parameters, or what constrains the output, is at fault.
    """

    def __init__(self, state: ServerState, body: ChatCompletionRequest):
        formats = state.serving.formats
        self.body = body
        self._tokenizer = state.serving.engine.tokenizer
        self.choice = tool_choice(body)
        if self.choice.mode == "auto" and (formats.tools is None or not state.config.enable_auto_tool_choice):
            raise NotSupportedError(
                'tool_choice "auto" (the default with tools) needs a server that was started with --enable-auto-tool-choice and '
                '--tool-call-parser; with tool_choice "none" the tools are rendered into the prompt',
                param="tool_choice",
            )
        self.constraint, self.tools = with_calls(
            structured_outputs(body), self.choice, formats, continues=bool(body.continue_final_message)
        )
        self.reasoning = formats.reasoning
        # The tokens of these markers must not be left out of the text.
        self.keeps_special_tokens = (self.tools not in (None, PLAIN_CALLS) and formats.special_tools) or (
            self.reasoning is not None and formats.special_reasoning
        )
        self.has_mistral_ids = formats.tools is not None and formats.tools.id_style == "mistral"
        self.repeats_reasoning = state.config.enable_reasoning_content
        self.used_ids = frozenset(_ids_in(body.messages)) if self.tools is not None else frozenset()

    @property
    def parses(self) -> bool:
        return self.tools is not None or self.reasoning is not None

    def reader(self, prompt: Prompt, *, skips_special_tokens: bool) -> AnswerReader:
        """A reader for one choice."""
        body = self.body
        inside = None
        if self.reasoning is not None and prompt.text is not None:
            inside = opens_reasoning(prompt.text, self.reasoning, continues=bool(body.continue_final_message))
        parser = OutputParser(self.tools, self.reasoning, schemas=body.tools, starts_in_reasoning=inside)
        counter = None
        if self.reasoning is not None:
            counting = OutputParser(None, self.reasoning, starts_in_reasoning=inside)
            counter = ReasoningCounter(counting, self._tokenizer, prompt.token_ids, skips_special_tokens=skips_special_tokens)
        return AnswerReader(self, parser, counter)


class AnswerReader:
    """Reads one choice, output by output. Every call that it reports has an id, which no other call of the conversation has."""

    def __init__(self, plan: AnswerPlan, parser: OutputParser, counter: ReasoningCounter | None):
        self._plan = plan
        self._parser = parser
        self._counter = counter
        self._used_ids = set(plan.used_ids)
        self._called = False

    @property
    def reasoning_tokens(self) -> int:
        return self._counter.count if self._counter is not None else 0

    def read(self, output: CompletionOutput) -> list[Event]:
        """The parts that the text and the end of an output make certain."""
        if self._counter is not None:
            self._counter.add(output.token_ids)
        events = self._parser.feed(output.text)
        if output.finish_reason is not None:
            events += self._parser.finish(truncated=output.finish_reason != "stop")
        return [self._with_id(event) for event in events if not self._is_hidden(event)]

    def finish_reason(self, output: CompletionOutput) -> str | None:
        """A model that stops behind calls waits for their results."""
        return "tool_calls" if self._called and output.finish_reason == "stop" else output.finish_reason

    def _is_hidden(self, event: Event) -> bool:
        if isinstance(event, ReasoningDelta):
            return self._plan.body.include_reasoning is False
        only_first = self._plan.body.parallel_tool_calls is False
        return only_first and isinstance(event, (ToolCallStart, ArgumentsDelta)) and event.index > 0

    def _with_id(self, event: Event) -> Event:
        if not isinstance(event, ToolCallStart):
            return event
        self._called = True
        call_id = event.id
        while not call_id or call_id in self._used_ids:
            call_id = self._new_id()
        self._used_ids.add(call_id)
        return ToolCallStart(event.index, event.name, call_id)

    def _new_id(self) -> str:
        if self._plan.has_mistral_ids:
            return "".join(random.choices(_MISTRAL_ID_CHARACTERS, k=_MISTRAL_ID_LENGTH))
        return f"call_{uuid.uuid4().hex}"


class ReasoningCounter:
    """Counts the tokens of reasoning, its markers included, one by one: outputs may bring several at once."""

    def __init__(self, parser: OutputParser, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], *, skips_special_tokens: bool):
        self.count = 0
        self._parser = parser
        self._stream = tokenizer.decode_stream(prompt_token_ids, skip_special_tokens=skips_special_tokens)

    def add(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if self._parser.reasoning_is_over:
                return
            inside = self._parser.in_reasoning
            self._parser.feed(self._stream.step(token_id))
            self.count += inside or self._parser.in_reasoning


def _ids_in(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Ids of the calls that a conversation holds already."""
    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            if isinstance(call, Mapping) and isinstance(call.get("id"), str):
                yield call["id"]
