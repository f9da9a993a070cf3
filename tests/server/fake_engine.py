"""An AsyncLLM that says what a test wants: real tokenizer, real input and output processing, no model and no process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Gauge

from jaxllm.config import EngineConfig
from jaxllm.core_types import EngineInfo, EngineOutput, EngineRequest, FinishReason, TokenLogprobs
from jaxllm.engine.front import Front
from jaxllm.engine.generation_config import GenerationDefaults
from jaxllm.engine.metrics import EngineMetrics
from jaxllm.errors import EngineDeadError, QueueFullError
from jaxllm.model_files import ModelFiles
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import SamplingParams
from jaxllm.text.tokenizer import Tokenizer, load_tokenizer
from tests.checkpoints import script_ids, write_tokenizer

EOS = 0
CONTEXT = 512
VOCAB = 512
MODEL = "scripted"


def load_test_tokenizer(directory: Path, words: Sequence[str] = (), chat_template: str | None = None) -> Tokenizer:
    write_tokenizer(directory, VOCAB, words)
    files = ModelFiles(
        kind="hf", path=directory, config={}, generation_config={}, name=MODEL, tokenizer_path=directory, chat_template=chat_template
    )
    return load_tokenizer(files)


class FakeMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        Gauge("jaxllm:num_requests_running", "Requests running", registry=self.registry).set(0)


class FakeEngine:
    """Emits `script` for every sequence, then end of sequence, one token a step.

    `on_token(request, position)` is awaited before each token: a test waits, raises or counts there. `open` holds the ids of requests
    in the engine; `seen` what came in.
    """

    def __init__(self, tokenizer: Tokenizer, script: str | Sequence[int | str] = "Hello world", **defaults: Any):
        self.tokenizer = tokenizer
        self.config = EngineConfig.from_options(model=MODEL, max_logprobs=5)
        self.info = EngineInfo(
            max_model_len=CONTEXT, vocab_size=VOCAB, page_size=16, num_pages=64, max_num_seqs=16, max_num_batched_tokens=256,
            dtype="float32", platform="cpu",
        )  # fmt: skip
        self.default_sampling_params = defaults
        self.model_name = MODEL
        self.metrics = FakeMetrics()
        self.script = script_ids(script)
        self.scripts: Callable[[EngineRequest], list[int]] = lambda request: self.script
        self.on_token: Callable[[EngineRequest, int], Any] = lambda request, position: asyncio.sleep(0)
        self.open: set[str] = set()
        self.seen: list[tuple[list[int], SamplingParams, dict[str, Any]]] = []
        self.dead: str | None = None
        self.queue_full = False
        self.cached_tokens = 0
        self.is_shut_down = False
        self.resets = 0
        self.profile: str | None = None
        self._front = Front(
            self.config, tokenizer, GenerationDefaults(defaults, [EOS]), self.info, EngineMetrics(self.info, model_name="m")
        )

    async def generate(self, prompt: Any, sampling_params: SamplingParams, request_id: str, **more: Any) -> AsyncIterator[RequestOutput]:
        request = self._front.input.process(request_id, prompt, sampling_params, **more)
        self.seen.append((request.prompt_token_ids, sampling_params, more))
        if self.dead:
            raise EngineDeadError(self.dead)
        if self.queue_full:
            raise QueueFullError("the queue is full: 4 requests wait", retry_after_s=3)
        assert request_id not in self.open
        state = self._front.output.add(request)
        self.open.add(request_id)
        try:
            position = 0
            while not state.finished:
                outputs = []
                for child in request.children:
                    if child.request_id in self._front.output._by_engine_id:
                        await self.on_token(child, position)
                        outputs.append(self._token(child, position))
                if self.dead:
                    raise EngineDeadError(self.dead)
                self._front.output.process(outputs)
                position += 1
                output = state.take()
                if output is not None:
                    yield output
        finally:
            self.open.discard(request_id)
            self._front.output.abort(request_id)

    def _token(self, request: EngineRequest, position: int) -> EngineOutput:
        params, script = request.sampling_params, self.scripts(request)
        token = script[position] if position < len(script) else EOS
        output = EngineOutput(request_id=request.request_id, new_token_ids=[token])
        if params.logprobs is not None:
            output.logprobs = [self._logprobs(token, params.logprobs)]
        elif params.logprob_token_ids is not None:
            ids = params.logprob_token_ids
            output.logprobs = [TokenLogprobs([token, *ids], [-0.25, *(-2.0 for _ in ids)], 1)]
        if position == 0:
            output.num_cached_tokens = self.cached_tokens
            if params.prompt_logprobs is not None:
                output.prompt_logprobs = [self._logprobs(token, params.prompt_logprobs) for token in request.prompt_token_ids[1:]]
        if token == EOS and not params.ignore_eos:
            output.finish_reason = FinishReason.STOP
        elif position + 1 == params.max_tokens:
            output.finish_reason = FinishReason.LENGTH
        return output

    def _logprobs(self, token: int, count: int) -> TokenLogprobs:
        """The token at -0.25 and rank 1, then the ids after it, each one lower, the last one impossible."""
        others = [(token + step) % VOCAB for step in range(1, count)]
        values = [-1.0 - step for step in range(len(others))]
        if len(values) > 1:
            values[-1] = float("-inf")
        return TokenLogprobs([token, *([token] if count else []), *others], [-0.25, *([-0.25] if count else []), *values], 1)

    async def check_health(self) -> None:
        if self.dead:
            raise EngineDeadError(self.dead)

    async def start(self) -> None: ...

    async def reset_prefix_cache(self) -> bool:
        self.resets += 1
        return True

    async def start_profile(self, directory: str) -> bool:
        was, self.profile = self.profile, directory
        return was is None

    async def stop_profile(self) -> bool:
        was, self.profile = self.profile, None
        return was is not None

    def shutdown(self) -> None:
        self.is_shut_down = True
