"""Latencies and throughput of a load, under the names that vLLM's benchmark prints."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from jaxllm.cli.bench.load import Outcome
from jaxllm.cli.bench.report import mean, percent_name, percentile, standard_deviation


def serving_metrics(outcomes: Sequence[Outcome], seconds: float, percents: Sequence[float]) -> dict[str, Any]:
    """Summarise a load.

    Args:
        outcomes: all requests; those with an error count as failed and nowhere else.
        seconds: from the first request offered to the last one finished.
        percents: percentiles of each latency, besides mean, median and standard deviation.
    """
    good = [outcome for outcome in outcomes if outcome.error is None]
    num_prompt_tokens = sum(outcome.num_prompt_tokens for outcome in good)
    num_output_tokens = sum(outcome.num_output_tokens for outcome in good)
    result: dict[str, Any] = {
        "duration": seconds,
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "total_input_tokens": num_prompt_tokens,
        "total_output_tokens": num_output_tokens,
        "request_throughput": len(good) / seconds,
        "output_throughput": num_output_tokens / seconds,
        "total_token_throughput": (num_prompt_tokens + num_output_tokens) / seconds,
        "max_concurrent_requests": _most_open(good),
    }
    for name, values in _latencies(good).items():
        milliseconds = [1000 * value for value in values]
        result[f"mean_{name}_ms"] = mean(milliseconds)
        result[f"median_{name}_ms"] = percentile(milliseconds, 50)
        result[f"std_{name}_ms"] = standard_deviation(milliseconds)
        for percent in percents:
            result[f"{percent_name(percent)}_{name}_ms"] = percentile(milliseconds, percent)
    return result


def _latencies(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """Seconds by kind. A request of one token has no time per output token."""
    firsts = [(outcome, outcome.first_token) for outcome in outcomes if outcome.first_token is not None]
    several = [(outcome, first) for outcome, first in firsts if outcome.num_output_tokens > 1]
    return {
        "ttft": [first - outcome.started for outcome, first in firsts],
        "tpot": [(outcome.chunk_times[-1] - first) / (outcome.num_output_tokens - 1) for outcome, first in several],
        "itl": [later - earlier for outcome in outcomes for earlier, later in pairwise(outcome.chunk_times)],
        "e2el": [outcome.seconds for outcome in outcomes],
    }


def _most_open(outcomes: Sequence[Outcome]) -> int:
    changes = sorted([(outcome.started, 1) for outcome in outcomes] + [(outcome.finished, -1) for outcome in outcomes])
    open_now = most = 0
    for _, change in changes:
        open_now += change
        most = max(most, open_now)
    return most
