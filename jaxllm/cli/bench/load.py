"""Offers requests to a running server at a rate, and what its clients saw, under the names that vLLM's benchmark prints."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx

from jaxllm.cli.bench.report import mean, percentile
from jaxllm.cli.bench.workload import BenchRequest
from jaxllm.cli.http_client import ServerError, read_event


@dataclass
class Outcome:
    """One request as the client saw it. Times in seconds; `chunk_times` are of every chunk with text."""

    num_prompt_tokens: int
    started: float = 0.0
    finished: float = 0.0
    chunk_times: list[float] = field(default_factory=list)
    num_output_tokens: int = 0
    error: str | None = None


async def offer(
    client: httpx.AsyncClient,
    url: str,
    model: str,
    requests: Sequence[BenchRequest],
    *,
    rate: float = float("inf"),
    concurrency: int | None = None,
    done: Callable[[], object] = lambda: None,
) -> list[Outcome]:
    """Send every request as a streaming completion and wait for all of them.

    Args:
        url: of `/v1/completions`.
        rate: requests a second, with the gaps of a Poisson process; infinite: all at once.
        concurrency: most requests open at once.
        done: called as each request ends.
    """
    limit, draw = asyncio.Semaphore(concurrency or len(requests)), random.Random(0)

    async def one(request: BenchRequest) -> Outcome:
        async with limit:
            outcome = await complete(client, url, model, request)
        done()
        return outcome

    tasks, due = [], time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for request in requests:
            tasks.append(group.create_task(one(request)))
            due += draw.expovariate(rate) if rate < float("inf") else 0.0
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
    return [task.result() for task in tasks]


async def complete(client: httpx.AsyncClient, url: str, model: str, request: BenchRequest) -> Outcome:
    """Run one streaming completion, greedily and to its full length; a failure is kept in the outcome."""
    content = {
        "model": model,
        "prompt": request.prompt,
        "max_tokens": request.out,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    outcome = Outcome(len(request.prompt), started=time.perf_counter())
    try:
        async with client.stream("POST", url, json=content) as response:
            if response.status_code != httpx.codes.OK:
                text = (await response.aread()).decode(errors="replace")
                outcome.error = f"HTTP {response.status_code}: {text[:200]}"
            else:
                await _read(response, outcome)
    except (httpx.HTTPError, ServerError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    outcome.finished = time.perf_counter()
    return outcome


async def _read(response: httpx.Response, outcome: Outcome) -> None:
    async for line in response.aiter_lines():
        now = time.perf_counter()
        if (event := read_event(line)) is None:
            return
        if usage := event.get("usage"):
            outcome.num_output_tokens = usage["completion_tokens"]
        # Every chunk of a choice stands for at least one token, also where the token has no text yet.
        if event.get("choices"):
            outcome.chunk_times.append(now)
    raise ServerError("the stream ended without [DONE]")


def serving_metrics(outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """Summarise a load of `seconds`; requests with an error count as failed and nowhere else."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    begun = [outcome for outcome in good if outcome.chunk_times]
    num_input, num_output = sum(o.num_prompt_tokens for o in good), sum(o.num_output_tokens for o in good)
    result: dict[str, Any] = {
        "duration": seconds,
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(good) / seconds,
        "output_throughput": num_output / seconds,
        "total_token_throughput": (num_input + num_output) / seconds,
        "max_concurrent_requests": _most_open(good),
    }
    latencies = {
        "ttft": [o.chunk_times[0] - o.started for o in begun],
        # A request of one token has no time per output token.
        "tpot": [(o.chunk_times[-1] - o.chunk_times[0]) / (o.num_output_tokens - 1) for o in begun if o.num_output_tokens > 1],
        "itl": [later - earlier for o in begun for earlier, later in pairwise(o.chunk_times)],
        "e2el": [o.finished - o.started for o in good],
    }
    for name, values in latencies.items():
        result[f"mean_{name}_ms"] = 1000 * mean(values)
        for head, percent in (("median", 50), ("p90", 90), ("p99", 99)):
            result[f"{head}_{name}_ms"] = 1000 * percentile(values, percent)
    return result


def _most_open(outcomes: Sequence[Outcome]) -> int:
    changes = sorted([(outcome.started, 1) for outcome in outcomes] + [(outcome.finished, -1) for outcome in outcomes])
    open_now = most = 0
    for _, change in changes:
        open_now += change
        most = max(most, open_now)
    return most
