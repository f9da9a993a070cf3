"""A model loaded in this terminal: an AsyncLLM whose event loop runs while an answer is waited for, read as a plain iterator."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Generator, Sequence
from typing import TYPE_CHECKING, Self

from jaxllm.cli.backends import Message, Piece, Sampling
from jaxllm.config import EngineConfig
from jaxllm.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from jaxllm.async_llm import AsyncLLM
    from jaxllm.outputs import RequestOutput


class LocalBackend:
    """Starts the engine when the block is entered, and stops it when it is left."""

    llm: AsyncLLM

    def __init__(self, config: EngineConfig):
        self._config = config
        # Turns ctrl-C into the cancellation of what it runs.
        self._loop = asyncio.Runner()

    @property
    def model(self) -> str:
        return self._config.model.model or "the default model"

    def __enter__(self) -> Self:
        from jaxllm.async_llm import AsyncLLM

        print(f"Loading {self.model} ...", file=sys.stderr, flush=True)
        self.llm = AsyncLLM(config=self._config)
        try:
            self._loop.run(self.llm.start())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.llm.shutdown()
        self._loop.close()

    def chat(self, messages: Sequence[Message], sampling: Sampling) -> Generator[Piece]:
        tokenizer = self.llm.tokenizer
        prompt = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True)
        # The template writes the special tokens itself.
        return self._stream(tokenizer.encode(prompt, add_special_tokens=False), sampling, longest=None)

    def complete(self, prompt: str, sampling: Sampling) -> Generator[Piece]:
        return self._stream(prompt, sampling, longest=SamplingParams().max_tokens)

    def _stream(self, prompt: str | list[int], sampling: Sampling, longest: int | None) -> Generator[Piece]:
        fields = {"max_tokens": longest, **self.llm.default_sampling_params, **sampling}
        outputs = self.llm.generate(prompt, SamplingParams(**fields, output_kind=RequestOutputKind.DELTA))
        try:
            while (output := self._loop.run(_next(outputs))) is not None:
                for part in output.outputs:
                    yield Piece(part.text, part.finish_reason)
        finally:
            # Closing the iterator aborts the request in the engine.
            self._loop.run(_close(outputs))


async def _next(outputs: AsyncGenerator[RequestOutput, None]) -> RequestOutput | None:
    return await anext(outputs, None)


async def _close(outputs: AsyncGenerator[RequestOutput, None]) -> None:
    await outputs.aclose()
