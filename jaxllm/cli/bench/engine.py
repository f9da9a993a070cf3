"""An engine in this process for benchmarks, and what a run on it cost. Token ids in, token ids out."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import msgspec
from tqdm import tqdm

from jaxllm.cli.bench.workload import BenchRequest
from jaxllm.cli.isolated import json_of
from jaxllm.cli.parser import Arguments
from jaxllm.config import CONFIG_GROUPS, EngineConfig
from jaxllm.core_types import EngineOutput, EngineRequest, FinishReason, SchedulerStats
from jaxllm.errors import ConfigError, JaxllmError
from jaxllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxllm.runner.model_runner import ModelRunner

_MEASURE_TIMEOUT_S = 300
_COUNTERS = ("num_steps", "num_scheduled_tokens", "num_padded_tokens", "host_seconds", "num_preemptions")


@dataclass
class Run:
    """One pass over a workload. Times in seconds."""

    num_prompt_tokens: int
    seconds: float = 0.0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    first_token_seconds: list[float] = field(default_factory=list)
    num_compilations: int = 0
    stats: SchedulerStats = field(default_factory=SchedulerStats)

    def as_json(self) -> dict[str, Any]:
        """Padding waste is the share of the computed tokens that were padding; the host's time leaves out waiting for the device."""
        stats = self.stats
        return {
            **{name: getattr(stats, name) for name in _COUNTERS},
            "padding_waste": 1 - stats.num_scheduled_tokens / stats.num_padded_tokens if stats.num_padded_tokens else 0.0,
            "host_ms_per_step": 1000 * stats.host_seconds / max(1, stats.num_steps),
            "num_cached_tokens": self.num_cached_tokens,
            "num_compilations": self.num_compilations,
        }


def open_engine(args: Arguments) -> BenchEngine:
    """Measure the hardware's limits, unless the flags say otherwise, and start the engine."""
    config = EngineConfig.from_options(**args.only(CONFIG_GROUPS))
    # Before the engine takes the device.
    limits = None if args.own.no_roofline else json_of("-m", "jaxllm.runner.hardware", timeout_s=_MEASURE_TIMEOUT_S)
    return BenchEngine(config, limits)


class BenchEngine:
    """Runs workloads of exact lengths, greedily. Every program is compiled before the first one.

    Args:
        limits: what one device was measured to do (`runner/hardware.py`); None compares with nothing.
    """

    def __init__(self, config: EngineConfig, limits: dict[str, Any] | None = None):
        from jaxllm.launch import start_engine

        started = time.perf_counter()
        self._core, self.info = start_engine(config)
        self._startup = {"startup_seconds": time.perf_counter() - started}
        self._runner.wait_until_compiled()
        self._startup["all_compiled_seconds"] = time.perf_counter() - started
        self._limits = limits
        self._ids = map(str, itertools.count())

    @property
    def _runner(self) -> ModelRunner:
        runner: Any = self._core.executor
        return runner

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._core.shutdown()

    def run(self, requests: Sequence[BenchRequest]) -> Run:
        """Offer all requests at once and wait for the last; prefixes cached by earlier runs are forgotten first.

        Raises:
            ConfigError: a request is longer than the engine takes.
            JaxllmError: a request did not produce its tokens.
        """
        longest = max(len(request.prompt) + request.out for request in requests)
        if longest > self.info.max_model_len:
            raise ConfigError(
                f"the longest request needs {longest} positions and the engine has max_model_len={self.info.max_model_len}; "
                "shorten the requests"
            )
        self._core.reset_prefix_cache()
        run = Run(sum(len(request.prompt) for request in requests))
        compiled = self._runner.num_compilations
        left: dict[str, int] = {}
        begun: set[str] = set()
        started = time.perf_counter()
        for request in requests:
            request_id = next(self._ids)
            left[request_id] = request.out
            params = SamplingParams(temperature=0.0, max_tokens=request.out, ignore_eos=True, detokenize=False)
            self._core.add_request(
                EngineRequest(request_id=request_id, prompt_token_ids=request.prompt, sampling_params=params, arrival_time=time.time())
            )
        with tqdm(total=len(requests), desc="Requests", dynamic_ncols=True, disable=not sys.stderr.isatty()) as bar:
            while left:
                step = self._core.step()
                now = time.perf_counter() - started
                for output in step.outputs:
                    _account(run, output, left, begun, now)
                bar.update(len(requests) - len(left) - bar.n)
                if step.stats is not None:
                    for name in _COUNTERS:
                        setattr(run.stats, name, getattr(run.stats, name) + getattr(step.stats, name))
        run.seconds = time.perf_counter() - started
        while self._core.has_work:
            self._core.step()
        run.num_compilations = self._runner.num_compilations - compiled
        return run

    def sections(self, run: Run, requests: Sequence[BenchRequest]) -> dict[str, Any]:
        """The parts of a result that every benchmark has; warns where the run compiled something."""
        if run.num_compilations:
            print(
                f"warning: {run.num_compilations} programs were compiled during the measured run; its figures include that", file=sys.stderr
            )
        info = msgspec.structs.asdict(self.info)
        names = ("platform", "dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "num_pages", "page_size")
        return {
            "engine": {name: info[name] for name in names} | self._startup | {"startup_phases": self.info.startup_seconds},
            "run": run.as_json(),
            "limits": self._limits,
            "roofline": self._ratios(run, requests),
        }

    def _ratios(self, run: Run, requests: Sequence[BenchRequest]) -> dict[str, float]:
        """What each device moved and computed, and the shares of its limits (model bandwidth and model FLOP/s utilisation, 1.0 is all)."""
        if self._limits is None:
            return {}
        sizes = [(len(request.prompt), request.out) for request in requests]
        work = self._runner.roofline.generation(sizes, run.stats.num_steps, run.num_cached_tokens)
        moved, computed = work.bytes / run.seconds, work.flops / run.seconds
        return {
            "bytes_per_second": moved,
            "flops_per_second": computed,
            "mbu": moved / self._limits["bytes_per_second"],
            "mfu": computed / self._limits["flops_per_second"][self.info.dtype],
        }


def _account(run: Run, output: EngineOutput, left: dict[str, int], begun: set[str], now: float) -> None:
    """Book what a step brought for one request; all requests were offered at second 0."""
    if output.request_id not in left:
        return
    run.num_cached_tokens += output.num_cached_tokens or 0
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
