"""Offers requests to a running server at a rate, and keeps the time of everything that comes back."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from jaxllm.cli.bench.workload import BenchRequest


@dataclass
class Outcome:
    """One request as the client saw it. Times in seconds; `chunk_times` are of every chunk with text, after the start."""

    num_prompt_tokens: int
    started: float = 0.0
    first_token: float | None = None
    finished: float = 0.0
    chunk_times: list[float] = field(default_factory=list)
    num_output_tokens: int = 0
    error: str | None = None

    @property
    def seconds(self) -> float:
        return self.finished - self.started


@dataclass(frozen=True)
class Load:
    """How requests are offered.

    `rate` in requests a second (infinite: all at once); their gaps follow a gamma distribution whose shape is `burstiness` (1: a
    Poisson process, below 1 burstier, above 1 steadier). `concurrency` bounds the requests that are open at once.
    """

    rate: float = float("inf")
    burstiness: float = 1.0
    concurrency: int | None = None
    seed: int = 0

    def delays(self, count: int) -> list[float]:
        """When each request is offered, in seconds after the start; the first one at once."""
        if self.rate == float("inf"):
            return [0.0] * count
        draw = random.Random(self.seed)
        at, delays = 0.0, []
        for _ in range(count):
            delays.append(at)
            at += draw.gammavariate(self.burstiness, 1 / (self.rate * self.burstiness))
        return delays


async def offer(
    client: httpx.AsyncClient,
    url: str,
    body: dict[str, Any],
    requests: Sequence[BenchRequest],
    load: Load,
    done: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Send every request as a streaming completion and wait for all of them.

    Args:
        url: of `/v1/completions`.
        body: fields that all requests share.
        done: called as each request ends.
    """
    limit = asyncio.Semaphore(load.concurrency or len(requests))

    async def one(request: BenchRequest) -> Outcome:
        async with limit:
            outcome = await complete(client, url, body, request)
        done(outcome)
        return outcome

    started = time.perf_counter()
    tasks = []
    try:
        for request, delay in zip(requests, load.delays(len(requests)), strict=True):
            wait = started + delay - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(one(request)))
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


async def complete(client: httpx.AsyncClient, url: str, body: dict[str, Any], request: BenchRequest) -> Outcome:
    """Run one streaming completion; a failure is kept in the outcome."""
    content = {
        **body,
        "prompt": request.prompt,
        "max_tokens": request.output_len,
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
    except httpx.HTTPError as error:
        outcome.error = f"{type(error).__name__}: {error}"
    outcome.finished = time.perf_counter()
    return outcome


async def _read(response: httpx.Response, outcome: Outcome) -> None:
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        now = time.perf_counter()
        data = line[5:].strip()
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            outcome.error = str(event["error"])
            return
        if usage := event.get("usage"):
            outcome.num_output_tokens = usage["completion_tokens"]
        # Every chunk of a choice stands for at least one token, also where the token has no text yet.
        if event.get("choices"):
            if outcome.first_token is None:
                outcome.first_token = now
            outcome.chunk_times.append(now)
    outcome.error = "the stream ended without [DONE]"
