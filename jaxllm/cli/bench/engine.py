"""An engine in this process for benchmarks, and what a run on it cost. Token ids in, token ids out."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

from jaxllm.cli.bench.workload import BenchRequest, check_fits
from jaxllm.config import EngineConfig
from jaxllm.core_types import EngineOutput, EngineRequest, FinishReason
from jaxllm.errors import JaxllmError
from jaxllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxllm.runner.model_runner import ModelRunner


@dataclass
class Run:
    """One pass over a workload. Times in seconds."""

    num_prompt_tokens: int
    seconds: float = 0.0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    first_token_seconds: list[float] = field(default_factory=list)
    request_seconds: list[float] = field(default_factory=list)
    num_compilations: int = 0
    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_padded_tokens: int = 0
    host_seconds: float = 0.0
    num_preemptions: int = 0

    @property
    def padding_waste(self) -> float:
        """Share of the computed tokens that were padding."""
        return 1 - self.num_scheduled_tokens / self.num_padded_tokens if self.num_padded_tokens else 0.0

    @property
    def host_ms_per_step(self) -> float:
        """Host time of a step without waiting for the device."""
        return 1000 * self.host_seconds / self.num_steps if self.num_steps else 0.0

    def as_json(self) -> dict[str, Any]:
        names = ("num_compilations", "num_steps", "num_scheduled_tokens", "num_padded_tokens", "padding_waste", "host_ms_per_step")
        return {name: getattr(self, name) for name in (*names, "num_cached_tokens", "num_preemptions")}


class BenchEngine:
    """Runs workloads of exact lengths, greedily. Every program is compiled before the first one."""

    def __init__(self, config: EngineConfig):
        from jaxllm.launch import start_engine

        started = time.perf_counter()
        self._core, self.info = start_engine(config)
        self.startup_seconds = time.perf_counter() - started
        self._runner.wait_until_compiled()
        self.all_compiled_seconds = time.perf_counter() - started
        self._ids = map(str, itertools.count())

    @property
    def _runner(self) -> ModelRunner:
        runner: Any = self._core.executor
        return runner

    def __enter__(self) -> BenchEngine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._core.shutdown()

    def run(self, requests: Sequence[BenchRequest], *, progress: bool = False) -> Run:
        """Offer all requests at once and wait for the last; prefixes cached by earlier runs are forgotten first.

        Raises:
            ConfigError: a request is longer than the engine takes.
            JaxllmError: a request did not produce its tokens.
        """
        from tqdm import tqdm

        check_fits(requests, self.info.max_model_len)
        self._core.reset_prefix_cache()
        run = Run(num_prompt_tokens=sum(len(request.prompt) for request in requests))
        compiled = self._runner.num_compilations
        left: dict[str, int] = {}
        begun: set[str] = set()
        with tqdm(total=len(requests), desc="Requests", dynamic_ncols=True, disable=not (progress and sys.stderr.isatty())) as bar:
            started = time.perf_counter()
            for request in requests:
                engine_request = self._engine_request(request)
                left[engine_request.request_id] = request.output_len
                self._core.add_request(engine_request)
            while left:
                step = self._core.step()
                now = time.perf_counter() - started
                for output in step.outputs:
                    _account(run, output, left, begun, now)
                    bar.update(output.finish_reason is not None)
                if step.stats is not None:
                    for name in ("num_steps", "num_scheduled_tokens", "num_padded_tokens", "host_seconds", "num_preemptions"):
                        setattr(run, name, getattr(run, name) + getattr(step.stats, name))
            run.seconds = time.perf_counter() - started
        while self._core.has_work:
            self._core.step()
        run.num_compilations = self._runner.num_compilations - compiled
        return run

    def describe(self) -> dict[str, Any]:
        """The engine as a section of the result."""
        names = ("platform", "dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "num_pages", "page_size")
        return {
            **{name: getattr(self.info, name) for name in names},
            "startup_seconds": self.startup_seconds,
            "all_compiled_seconds": self.all_compiled_seconds,
            "startup_phases": dict(self.info.startup_seconds),
        }

    def _engine_request(self, request: BenchRequest) -> EngineRequest:
        params = SamplingParams(temperature=0.0, max_tokens=request.output_len, ignore_eos=True, detokenize=False)
        return EngineRequest(request_id=next(self._ids), prompt_token_ids=request.prompt, sampling_params=params, arrival_time=time.time())


def _account(run: Run, output: EngineOutput, left: dict[str, int], begun: set[str], now: float) -> None:
    """Book what a step brought for one request; all requests were offered at second 0."""
    if output.request_id not in left:
        return
    if output.num_cached_tokens:
        run.num_cached_tokens += output.num_cached_tokens
    count = len(output.new_token_ids)
    if count and output.request_id not in begun:
        begun.add(output.request_id)
        run.first_token_seconds.append(now)
    run.num_output_tokens += count
    left[output.request_id] -= count
    if output.finish_reason is not None:
        missing = left.pop(output.request_id)
        if missing or output.finish_reason is not FinishReason.LENGTH:
            raise JaxllmError(f"a request ended with {output.finish_reason}, {missing} tokens short of its length: {output.error or ''}")
        run.request_seconds.append(now)
