"""`jaxllm bench serve`: what clients of a running server see at a given load."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from typing import Any

from jaxllm.cli.bench.report import add_output_flag, report
from jaxllm.cli.bench.workload import Workload, add_workload_flags, workload_of
from jaxllm.cli.parser import CommandParser, at_least
from jaxllm.errors import JaxllmError


def build_parser() -> CommandParser:
    parser = CommandParser(
        "bench serve",
        "Offer requests to a running server and measure what its clients see: throughput, and the time to the first token (ttft), per\n"
        "output token behind it (tpot), between two chunks (itl) and of the whole request (e2el). Greedy, exact lengths.",
    )
    own = parser.own
    own.add_argument("--base-url", default="http://127.0.0.1:8000", metavar="URL", help="Server, without /v1 [http://127.0.0.1:8000]")
    own.add_argument("--model", metavar="NAME", help="Model to ask for [the first one the server lists]")
    own.add_argument("--api-key", metavar="KEY", help="Key for the server")
    add_workload_flags(own)
    own.add_argument("--vocab-size", type=at_least(2), default=30_000, metavar="N", help="Random token ids lie below it [30000]")
    own.add_argument(
        "--request-rate", type=at_least(0.001, float), default=float("inf"), metavar="R", help="Requests a second [all at once]"
    )
    own.add_argument("--max-concurrency", type=at_least(1), metavar="N", help="Most requests open at once [no limit]")
    add_output_flag(own)
    return parser


def main(argv: Sequence[str]) -> int:
    own = build_parser().parse(argv).own
    result = asyncio.run(_measure(own, workload_of(own, own.vocab_size)))
    report("Serving", result, own.output_json)
    for error in result["errors"]:
        print(f"error: {error}", file=sys.stderr)
    return 0 if result["completed"] else 1


async def _measure(own: argparse.Namespace, workload: Workload) -> dict[str, Any]:
    import httpx
    from tqdm import tqdm

    from jaxllm.cli.bench.load import complete, offer, serving_metrics
    from jaxllm.cli.http_client import HttpBackend

    base, requests = own.base_url.rstrip("/"), workload.requests
    with HttpBackend(f"{base}/v1", model=own.model, api_key=own.api_key, hint="or name another with --base-url") as backend:
        model, headers = backend.model, backend.headers
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=own.max_concurrency or len(requests))
    timeout = httpx.Timeout(None, connect=30.0)
    url = f"{base}/v1/completions"
    async with httpx.AsyncClient(timeout=timeout, limits=limits, headers=headers, trust_env=False) as client:
        # Warms up the server, and shows whether it serves at all.
        first = await complete(client, url, model, requests[0])
        if first.error is not None:
            raise JaxllmError(f"the first request failed: {first.error}")
        with tqdm(total=len(requests), desc="Requests", dynamic_ncols=True, disable=not sys.stderr.isatty()) as bar:
            started = time.perf_counter()
            outcomes = await offer(
                client, url, model, requests, rate=own.request_rate, concurrency=own.max_concurrency, done=lambda: bar.update()
            )
            seconds = time.perf_counter() - started
    return {
        "model_id": model,
        "workload": workload.name,
        "num_prompts": len(requests),
        "request_rate": own.request_rate if own.request_rate != float("inf") else "inf",
        "max_concurrency": own.max_concurrency,
        **serving_metrics(outcomes, seconds),
        "errors": sorted({outcome.error for outcome in outcomes if outcome.error is not None})[:10],
    }
