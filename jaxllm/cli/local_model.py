"""A model loaded in this terminal: an AsyncLLM on an event loop of its own, read as a plain iterator."""

from __future__ import annotations

import asyncio
import itertools
import queue
import sys
import threading
from collections.abc import Coroutine, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from jaxllm.cli.backends import Message, Piece, Sampling
from jaxllm.config import EngineConfig
from jaxllm.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from jaxllm.async_llm import AsyncLLM

# How long a waiting main thread may be deaf to ctrl-C.
_POLL_S = 0.1


class LocalBackend:
    """Starts the engine when the block is entered, and stops it when it is left."""

    def __init__(self, config: EngineConfig):
        self._config = config
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="jaxllm-local", daemon=True)
        self._ids = itertools.count()
        self._llm: AsyncLLM | None = None

    @property
    def model(self) -> str:
        return self._config.model.model or "the default model"

    @property
    def llm(self) -> AsyncLLM:
        assert self._llm is not None, "the engine runs inside `with` only"
        return self._llm

    def __enter__(self) -> LocalBackend:
        print(f"Loading {self.model} ...", file=sys.stderr, flush=True)
        self._thread.start()
        try:
            self._llm = self._wait(self._start())
        except Exception:
            self._close_loop()
            raise
        # An interrupt does not wait for the loop, which may be downloading or loading; it ends with this process.
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.llm.shutdown()
        finally:
            self._close_loop()

    def chat(self, messages: Sequence[Message], sampling: Sampling) -> Iterator[Piece]:
        tokenizer = self.llm.tokenizer
        prompt = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True)
        # The template writes the special tokens itself.
        return self._stream(tokenizer.encode(prompt, add_special_tokens=False), sampling, longest=None)

    def complete(self, prompt: str, sampling: Sampling) -> Iterator[Piece]:
        return self._stream(prompt, sampling, longest=SamplingParams().max_tokens)

    def _stream(self, prompt: str | list[int], sampling: Sampling, longest: int | None) -> Iterator[Piece]:
        fields = {"max_tokens": longest, **self.llm.default_sampling_params, **sampling.given()}
        params = SamplingParams(**fields, output_kind=RequestOutputKind.DELTA)
        pieces: queue.SimpleQueue[Piece | BaseException | None] = queue.SimpleQueue()

        async def pump() -> None:
            try:
                async for output in self.llm.generate(prompt, params, f"terminal-{next(self._ids)}"):
                    for part in output.outputs:
                        pieces.put(Piece(part.text, part.finish_reason))
                pieces.put(None)
            except Exception as error:
                pieces.put(error)

        future = asyncio.run_coroutine_threadsafe(pump(), self._loop)
        try:
            while (piece := _get(pieces)) is not None:
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
        finally:
            # Cancelling the iterator aborts the request in the engine.
            future.cancel()

    async def _start(self) -> AsyncLLM:
        from jaxllm.async_llm import AsyncLLM

        llm = AsyncLLM.from_config(self._config)
        try:
            await llm.start()
        except BaseException:
            llm.shutdown()
            raise
        return llm

    def _wait(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            while True:
                try:
                    return future.result(timeout=_POLL_S)
                except TimeoutError:
                    if future.done():
                        raise
        except BaseException:
            future.cancel()
            raise

    def _close_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _get(pieces: queue.SimpleQueue[Piece | BaseException | None]) -> Piece | BaseException | None:
    while True:
        try:
            return pieces.get(timeout=_POLL_S)
        except queue.Empty:
            continue
