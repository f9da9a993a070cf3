"""A model loaded in the terminal: its event loop, its interrupts and its end. The engine is a stand-in."""

from __future__ import annotations

import asyncio
import sys
import types
from collections.abc import AsyncIterator
from typing import Any

import pytest

from jaxllm.cli.local_model import LocalBackend
from jaxllm.config import EngineConfig
from jaxllm.errors import InvalidRequestError, ModelLoadError
from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.sampling_params import RequestOutputKind, SamplingParams


class Tokenizer:
    def apply_chat_template(self, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
        return "|".join(message["content"] for message in messages)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [*([0] if add_special_tokens else []), *map(ord, text)]


class Engine:
    """Says `a`, `b`, `c`; with a prompt that starts with "wait" it says `a` and then nothing."""

    fails: Exception | None = None

    def __init__(self) -> None:
        self.tokenizer = Tokenizer()
        self.default_sampling_params = {"temperature": 0.5, "max_tokens": 7}
        self.requests: list[tuple[Any, SamplingParams]] = []
        self.cancelled = 0
        self.stopped = False

    async def start(self) -> None:
        if self.fails:
            raise self.fails

    async def generate(self, prompt: Any, params: SamplingParams) -> AsyncIterator[RequestOutput]:
        self.requests.append((prompt, params))
        if prompt == "":
            raise InvalidRequestError("the prompt is empty")
        try:
            for index, text in enumerate("abc"):
                reason = "stop" if text == "c" else None
                part = CompletionOutput(index=0, text=text, token_ids=[index], finish_reason=reason)
                yield RequestOutput("0", None, [], None, [part], finished=reason is not None)
                if str(prompt).startswith("wait"):
                    await asyncio.sleep(60)
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += 1
            raise

    def shutdown(self) -> None:
        self.stopped = True


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = Engine()
    module: Any = types.ModuleType("jaxllm.async_llm")
    module.AsyncLLM = lambda config: engine
    monkeypatch.setitem(sys.modules, "jaxllm.async_llm", module)
    return engine


def test_a_chat_renders_the_template_and_streams(engine: Engine):
    with LocalBackend(EngineConfig()) as backend:
        pieces = list(backend.chat([{"role": "user", "content": "x"}], {"top_p": 0.9}))

    assert "".join(piece.text for piece in pieces) == "abc"
    assert pieces[-1].finish_reason == "stop"
    [(prompt, params)] = engine.requests
    assert prompt == [ord("x")], "the template writes the special tokens itself"
    assert (params.temperature, params.top_p, params.max_tokens, params.output_kind) == (0.5, 0.9, 7, RequestOutputKind.DELTA)
    assert engine.stopped


def test_closing_a_stream_cancels_its_request(engine: Engine):
    with LocalBackend(EngineConfig()) as backend:
        stream = backend.complete("wait", {})
        assert next(stream).text == "a"
        stream.close()
        assert "".join(piece.text for piece in backend.complete("go", {})) == "abc"

    assert engine.cancelled == 1


def test_a_failed_request_is_raised_here_and_the_next_one_works(engine: Engine):
    with LocalBackend(EngineConfig()) as backend:
        with pytest.raises(InvalidRequestError, match="empty"):
            list(backend.complete("", {}))
        assert list(backend.complete("go", {}))


def test_an_engine_that_does_not_start_is_one_error(engine: Engine):
    engine.fails = ModelLoadError("no such model")

    with pytest.raises(ModelLoadError, match="no such model"), LocalBackend(EngineConfig()):
        pass

    assert engine.stopped


def test_the_engine_stops_when_the_session_fails(engine: Engine):
    with pytest.raises(ZeroDivisionError), LocalBackend(EngineConfig()):
        raise ZeroDivisionError

    assert engine.stopped
