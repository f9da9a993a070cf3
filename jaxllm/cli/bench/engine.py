"""An engine in this process for benchmarks, and what a run on it cost."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from jaxllm.cli.bench.workload import BenchRequest, check_fits
from jaxllm.config import EngineConfig
from jaxllm.errors import JaxllmError
from jaxllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxllm.outputs import RequestOutput

# What the engine counts, without the prefix and the `_total` of its metrics.
COUNTERS = ("engine_steps", "scheduled_tokens", "padded_tokens", "host_seconds", "num_preemptions")


@dataclass(frozen=True)
class Run:
    """One pass over a workload. Times in seconds."""

    seconds: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    first_token_seconds: list[float]
    request_seconds: list[float]
    num_compilations: int
    num_steps: int
    num_scheduled_tokens: int
    num_padded_tokens: int
    host_seconds: float
    num_preemptions: int

    @property
    def padding_waste(self) -> float:
        """Share of the computed tokens that were padding."""
        return 1 - self.num_scheduled_tokens / self.num_padded_tokens if self.num_padded_tokens else 0.0

    @property
    def host_ms_per_step(self) -> float:
        return 1000 * self.host_seconds / self.num_steps if self.num_steps else 0.0

    def as_json(self) -> dict[str, Any]:
        return {
            "num_compilations": self.num_compilations,
            "num_steps": self.num_steps,
            "num_scheduled_tokens": self.num_scheduled_tokens,
            "num_padded_tokens": self.num_padded_tokens,
            "padding_waste": self.padding_waste,
            "host_ms_per_step": self.host_ms_per_step,
            "num_cached_tokens": self.num_cached_tokens,
            "num_preemptions": self.num_preemptions,
        }


class BenchEngine:
    """An `LLM` that runs workloads of exact lengths, greedily."""

    def __init__(self, config: EngineConfig):
        from jaxllm.llm import LLM
        from jaxllm.runner.compilations import num_compilations

        self._count = num_compilations
        started = time.perf_counter()
        self._llm = LLM.from_config(config)
        self.startup_seconds = time.perf_counter() - started
        self.info = self._llm.info

    def __enter__(self) -> BenchEngine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._llm.close()

    def run(self, requests: Sequence[BenchRequest], *, progress: bool = False) -> Run:
        """Offer all requests at once and wait for the last; prefixes cached by earlier runs are forgotten first.

        Raises:
            ConfigError: a request is longer than the engine takes.
            JaxllmError: a request did not produce its tokens.
        """
        check_fits(requests, self.info.max_model_len)
        self._llm.reset_prefix_cache()
        prompts = [request.prompt for request in requests]
        params = [SamplingParams(temperature=0.0, max_tokens=request.output_len, ignore_eos=True, detokenize=False) for request in requests]
        before, compiled = self._counters(), self._count()
        started = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=progress and sys.stderr.isatty())
        seconds = time.perf_counter() - started
        compiled = self._count() - compiled
        counted = {name: value - before[name] for name, value in self._counters().items()}
        _check_lengths(requests, outputs)
        times = [output.metrics for output in outputs if output.metrics is not None]
        return Run(
            seconds=seconds,
            num_prompt_tokens=sum(map(len, prompts)),
            num_output_tokens=sum(len(output.outputs[0].token_ids) for output in outputs),
            num_cached_tokens=sum(output.num_cached_tokens or 0 for output in outputs),
            first_token_seconds=[one.first_token_time - one.arrival_time for one in times if one.first_token_time is not None],
            request_seconds=[one.finished_time - one.arrival_time for one in times if one.finished_time is not None],
            num_compilations=compiled,
            num_steps=int(counted["engine_steps"]),
            num_scheduled_tokens=int(counted["scheduled_tokens"]),
            num_padded_tokens=int(counted["padded_tokens"]),
            host_seconds=counted["host_seconds"],
            num_preemptions=int(counted["num_preemptions"]),
        )

    def describe(self) -> dict[str, Any]:
        """The engine as a section of the result."""
        info = self.info
        return {
            "platform": info.platform,
            "dtype": info.dtype,
            "max_model_len": info.max_model_len,
            "max_num_seqs": info.max_num_seqs,
            "max_num_batched_tokens": info.max_num_batched_tokens,
            "num_pages": info.num_pages,
            "page_size": info.page_size,
            "startup_seconds": self.startup_seconds,
            "startup_phases": dict(info.startup_seconds),
        }

    def _counters(self) -> dict[str, float]:
        found = {metric.name.partition(":")[2].removesuffix("_total"): metric.value for metric in self._llm.get_metrics()}
        return {name: float(found[name]) for name in COUNTERS}


def _check_lengths(requests: Sequence[BenchRequest], outputs: Sequence[RequestOutput]) -> None:
    for request, output in zip(requests, outputs, strict=True):
        made = len(output.outputs[0].token_ids)
        if made != request.output_len:
            reason = output.outputs[0].finish_reason
            raise JaxllmError(
                f"request {output.request_id} produced {made} tokens instead of {request.output_len} (finish reason {reason})"
            )
