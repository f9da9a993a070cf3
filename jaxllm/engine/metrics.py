"""What the engine does, for Prometheus, for `LLM.get_metrics` and as a line in the log. Metric names are vLLM's."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from jaxllm.core_types import EngineInfo, EngineOutput, EngineOutputs, EngineRequest, ErrorKind, FinishReason, SchedulerStats
from jaxllm.outputs import Metric

logger = logging.getLogger(__name__)

# Seconds between two stats lines.
LOG_INTERVAL = 10.0
# The hit rate of the stats line covers this many recent steps that looked something up.
_RECENT_STEPS = 1000

_LABELS = ("model_name", "engine")
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_NEXT_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_LATENCY = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)


def _token_buckets(most: int) -> list[int]:
    """1, 2, 5, 10, 20, ... up to `most`."""
    return [digit * 10**power for power in range(len(str(most))) for digit in (1, 2, 5) if digit * 10**power <= most]


class _Sequence:
    """Times (seconds since the epoch) and counts of one open sequence."""

    __slots__ = ("arrival", "first_scheduled", "first_token", "last_token", "max_tokens", "num_outputs", "num_preemptions", "num_prompt")

    def __init__(self, request: EngineRequest):
        self.arrival = request.arrival_time
        self.num_prompt = len(request.prompt_token_ids) + len(request.encoder_token_ids)
        self.max_tokens = request.sampling_params.max_tokens
        self.first_scheduled: float | None = None
        self.first_token: float | None = None
        self.last_token = 0.0
        self.num_outputs = 0
        self.num_preemptions = 0


class EngineMetrics:
    """Counts what the front sends to an engine and gets back. Kept in a registry of its own.

    The front calls `add_request` for each sequence, `update` with everything that the engine sends, and `finish` for a sequence that it
    ends itself (a stop string, a client that left).

    Args:
        info: what the engine said of itself.
        model_name: value of the label `model_name`.
        prefix: what stands before the colon of each name; "vllm" fits existing dashboards.
        engine: value of the label `engine`.
    """

    def __init__(self, info: EngineInfo, *, model_name: str, prefix: str = "jaxllm", engine: int = 0):
        self.registry = CollectorRegistry()
        self._prefix, self._engine = prefix, engine
        self._label_values = {"model_name": model_name, "engine": str(engine)}
        self._sequences: dict[str, _Sequence] = {}
        self._define(info)
        # For the stats line.
        self._stats = SchedulerStats()
        self._recent: deque[tuple[int, int]] = deque(maxlen=_RECENT_STEPS)
        self._computed_prompt_tokens = self._generated_tokens = 0
        self._last_log = time.monotonic()
        self._was_idle = False

    def _define(self, info: EngineInfo) -> None:
        gauge, counter, histogram = self._gauge, self._counter, self._histogram
        self._running = gauge("num_requests_running", "Requests that hold a slot")
        self._waiting = gauge("num_requests_waiting", "Requests that wait for a slot or for pages")
        self._waiting_by_reason = gauge("num_requests_waiting_by_reason", "Waiting requests by what they wait for", reason="capacity")
        self._usage = gauge("kv_cache_usage_perc", "Share of KV pages in use, 0 to 1")
        self._queries = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache")
        self._hits = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache")
        self._preemptions = counter("num_preemptions", "Times that a request gave its pages to another one")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that gave a first token")
        self._cached_tokens = counter("prompt_tokens_cached", "Those of them that came from the prefix cache")
        by_source = "prompt_tokens_by_source", "Prompt tokens by where their keys and values came from"
        sources = self._family(Counter, *by_source, extra=("source",))
        self._computed_source, self._hit_source = (
            sources.labels(**self._label_values, source=source) for source in ("local_compute", "local_cache_hit")
        )
        self._generation_tokens = counter("generation_tokens", "Tokens generated")
        self._success = self._family(Counter, "request_success", "Requests that ended, by reason", extra=("finished_reason",))
        self._rejections = self._family(Counter, "admission_rejections", "Requests that were not let in, by reason", extra=("reason",))
        for reason in FinishReason:
            self._success.labels(**self._label_values, finished_reason=str(reason))

        self._steps = counter("engine_steps", "Steps of the engine")
        self._scheduled_tokens = counter("scheduled_tokens", "Tokens computed")
        self._padded_tokens = counter("padded_tokens", "Tokens that the padded shapes of the steps had room for")
        self._host_seconds = counter("host_seconds", "Seconds that the host spent on scheduling, building batches and committing results")

        tokens = _token_buckets(info.max_model_len)
        self._step_tokens = histogram("iteration_tokens_total", "Tokens per step", _STEP_TOKENS)
        self._time_to_first = histogram("time_to_first_token_seconds", "Arrival to first token", _FIRST_TOKEN)
        self._inter_token = histogram("inter_token_latency_seconds", "Between two tokens of a request", _NEXT_TOKEN)
        self._per_token = histogram("request_time_per_output_token_seconds", "Mean of a request between tokens", _NEXT_TOKEN)
        self._e2e = histogram("e2e_request_latency_seconds", "Arrival to end", _LATENCY)
        self._queue_time = histogram("request_queue_time_seconds", "Arrival to first step", _LATENCY)
        self._prefill_time = histogram("request_prefill_time_seconds", "First step to first token", _LATENCY)
        self._decode_time = histogram("request_decode_time_seconds", "First to last token", _LATENCY)
        self._inference_time = histogram("request_inference_time_seconds", "First step to last token", _LATENCY)
        self._request_prompt = histogram("request_prompt_tokens", "Prompt tokens of a request", tokens)
        self._request_generation = histogram("request_generation_tokens", "Tokens generated for a request", tokens)
        self._request_n = histogram("request_params_n", "Parameter n", (1, 2, 5, 10, 20))
        self._request_max = histogram("request_params_max_tokens", "Parameter max_tokens", tokens)
        self._request_preemptions = histogram("request_num_preemptions", "Preemptions of a request", (0, 1, 2, 5, 10, 20, 50, 100))

        cache = {"block_size": str(info.page_size), "num_gpu_blocks": str(info.num_pages)}
        gauge("cache_config_info", "The KV cache as configured", **cache).set(1)

    def _family(self, kind: Any, name: str, help: str, *, extra: Sequence[str] = (), **options: Any) -> Any:
        return kind(f"{self._prefix}:{name}", help, (*_LABELS, *extra), registry=self.registry, **options)

    def _gauge(self, name: str, help: str, **extra: str) -> Gauge:
        return self._family(Gauge, name, help, extra=tuple(extra)).labels(**self._label_values, **extra)

    def _counter(self, name: str, help: str) -> Counter:
        return self._family(Counter, name, help).labels(**self._label_values)

    def _histogram(self, name: str, help: str, buckets: Sequence[float]) -> Histogram:
        return self._family(Histogram, name, help, buckets=buckets).labels(**self._label_values)

    # ------------------------------------------------------------------ fed by the front

    def add_request(self, request: EngineRequest, *, n: int | None = 1) -> None:
        """A sequence goes to the engine. `n`: the parameter of its request, None for all but the first of its sequences."""
        self._sequences[request.request_id] = _Sequence(request)
        if n is not None:
            self._request_n.observe(n)

    def update(self, outputs: EngineOutputs, now: float | None = None) -> None:
        """Count what a step brought. `now`: seconds since the epoch."""
        now = time.time() if now is None else now
        if outputs.stats is not None:
            self._count_step(outputs.stats)
        for output in outputs.outputs:
            sequence = self._sequences.get(output.request_id)
            if sequence is not None:
                self._count_output(sequence, output, now)
                if output.finish_reason is not None:
                    self._end(sequence, output, now)

    def finish(self, request_id: str, reason: str, now: float | None = None) -> None:
        """The front has ended a sequence; what the engine still says of it is not counted."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            output = EngineOutput(request_id=request_id, finish_reason=FinishReason(reason))
            self._end(sequence, output, time.time() if now is None else now)

    def _count_step(self, stats: SchedulerStats) -> None:
        self._stats = stats
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._waiting_by_reason.set(stats.num_waiting)
        self._usage.set(stats.kv_cache_usage)
        self._steps.inc(stats.num_steps)
        self._host_seconds.inc(max(0.0, stats.host_seconds))
        if stats.num_scheduled_tokens:
            self._scheduled_tokens.inc(stats.num_scheduled_tokens)
            self._padded_tokens.inc(stats.num_padded_tokens)
            self._step_tokens.observe(stats.num_scheduled_tokens)
        if stats.prefix_cache_queries:
            self._queries.inc(stats.prefix_cache_queries)
            self._hits.inc(stats.prefix_cache_hits)
            self._recent.append((stats.prefix_cache_queries, stats.prefix_cache_hits))
        if stats.num_preemptions:
            self._preemptions.inc(stats.num_preemptions)

    def _count_output(self, sequence: _Sequence, output: EngineOutput, now: float) -> None:
        sequence.num_preemptions += output.num_preemptions
        if output.first_scheduled_time is not None:
            sequence.first_scheduled = output.first_scheduled_time
        if not output.new_token_ids and output.pooled is None:
            return
        count = len(output.new_token_ids)
        self._generation_tokens.inc(count)
        self._generated_tokens += count
        sequence.num_outputs += count
        if sequence.first_token is None:
            sequence.first_token = now
            self._time_to_first.observe(now - sequence.arrival)
            cached = output.num_cached_tokens or 0
            computed = sequence.num_prompt - cached
            self._prompt_tokens.inc(sequence.num_prompt)
            self._cached_tokens.inc(cached)
            self._computed_source.inc(computed)
            self._hit_source.inc(cached)
            self._computed_prompt_tokens += computed
        else:
            self._inter_token.observe(now - sequence.last_token)
        sequence.last_token = now

    def _end(self, sequence: _Sequence, output: EngineOutput, now: float) -> None:
        del self._sequences[output.request_id]
        if output.error_kind in (ErrorKind.QUEUE_FULL, ErrorKind.INVALID):
            self._rejections.labels(**self._label_values, reason=str(output.error_kind)).inc()
            return
        self._success.labels(**self._label_values, finished_reason=str(output.finish_reason)).inc()
        self._e2e.observe(now - sequence.arrival)
        self._request_prompt.observe(sequence.num_prompt)
        self._request_generation.observe(sequence.num_outputs)
        self._request_preemptions.observe(sequence.num_preemptions)
        if sequence.max_tokens is not None:
            self._request_max.observe(sequence.max_tokens)
        if sequence.first_scheduled is not None:
            self._queue_time.observe(sequence.first_scheduled - sequence.arrival)
        if sequence.first_token is not None:
            self._decode_time.observe(sequence.last_token - sequence.first_token)
            if sequence.num_outputs > 1:
                self._per_token.observe((sequence.last_token - sequence.first_token) / (sequence.num_outputs - 1))
            if sequence.first_scheduled is not None:
                self._prefill_time.observe(sequence.first_token - sequence.first_scheduled)
                self._inference_time.observe(sequence.last_token - sequence.first_scheduled)

    # ------------------------------------------------------------------ read

    def snapshot(self) -> list[Metric]:
        """Every metric as it stands, for `LLM.get_metrics`.

        Labels other than the model's and the engine's follow the name in braces; counters go by their name without "_total".
        """
        found = []
        for family in self.registry.collect():
            series: dict[str, dict[str, float]] = {}
            for sample in family.samples:
                if sample.name.endswith("_created"):
                    continue
                extra = [f'{name}="{value}"' for name, value in sample.labels.items() if name not in (*_LABELS, "le")]
                name = family.name + (f"{{{','.join(extra)}}}" if extra else "")
                part = sample.labels.get("le") or sample.name.removeprefix(family.name)
                series.setdefault(name, {})[part] = sample.value
            for name, parts in series.items():
                value = parts if family.type == "histogram" else next(iter(parts.values()))
                found.append(Metric(name, family.type, value))
        return found

    def stats_line(self, seconds: float) -> str:
        """The state of the engine and its mean speed over the last `seconds`, as one line."""
        queries = sum(queries for queries, _ in self._recent)
        hits = sum(hits for _, hits in self._recent)
        return (
            f"Engine {self._engine:03d}: "
            f"Avg prompt throughput: {self._computed_prompt_tokens / seconds:.1f} tokens/s, "
            f"Avg generation throughput: {self._generated_tokens / seconds:.1f} tokens/s, "
            f"Running: {self._stats.num_running} reqs, Waiting: {self._stats.num_waiting} reqs, "
            f"KV cache usage: {100 * self._stats.kv_cache_usage:.1f}%, "
            f"Prefix cache hit rate: {100 * hits / max(queries, 1):.1f}%"
        )

    def log_stats(self) -> None:
        """Write the stats line and start its next interval. To be called every `LOG_INTERVAL` seconds; an idle engine is told once."""
        now = time.monotonic()
        idle = not (self._computed_prompt_tokens or self._generated_tokens or self._stats.num_running or self._stats.num_waiting)
        level = logging.DEBUG if idle and self._was_idle else logging.INFO
        if logger.isEnabledFor(level):
            logger.log(level, "%s", self.stats_line(max(now - self._last_log, 1e-9)))
        self._was_idle, self._last_log = idle, now
        self._computed_prompt_tokens = self._generated_tokens = 0
