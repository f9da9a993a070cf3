"""`jaxllm bench serve`: what clients of a running server see at a given load."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxllm.cli.bench.report import check_output_path, parse_percentiles, percent_name, print_rows, shown, write_json
from jaxllm.cli.bench.workload import Workload, add_workload_flags, check_workload_flags, workload_of
from jaxllm.cli.parser import CommandParser
from jaxllm.errors import ConfigError, JaxllmError

if TYPE_CHECKING:
    import httpx

LATENCIES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


def build_parser() -> CommandParser:
    parser = CommandParser(
        "bench serve", "Offer requests to a running server and measure what its clients see: throughput, TTFT, TPOT, ITL, E2E latency."
    )
    own = parser.own
    own.add_argument("--base-url", metavar="URL", help="Server, without /v1 [http://HOST:PORT]")
    own.add_argument("--host", default="127.0.0.1", help="Its address [127.0.0.1]")
    own.add_argument("--port", type=int, default=8000, metavar="N", help="Its port [8000]")
    own.add_argument("--endpoint", default="/v1/completions", metavar="PATH", help="Path of the completions API [/v1/completions]")
    own.add_argument("--model", metavar="NAME", help="Model to ask for [the first one the server lists]")
    own.add_argument("--api-key", metavar="KEY", help="Key for the server")
    add_workload_flags(own, num_prompts=1000, input_len=1024, output_len=128)
    own.add_argument(
        "--vocab-size", type=int, default=30_000, metavar="N", help="Random token ids lie below it; at most the model's vocabulary [30000]"
    )
    own.add_argument("--request-rate", type=float, default=float("inf"), metavar="R", help="Requests offered a second [all at once]")
    own.add_argument("--burstiness", type=float, default=1.0, metavar="B", help="1: Poisson arrivals; below 1 burstier, above steadier [1]")
    own.add_argument("--max-concurrency", type=int, metavar="N", help="Most requests open at once [no limit]")
    own.add_argument("--num-warmups", type=int, default=1, metavar="N", help="Requests sent before, which do not count [1]")
    own.add_argument("--temperature", type=float, default=0.0, metavar="X", help="Sampling temperature [0]")
    own.add_argument("--ignore-eos", action="store_true", help="As always here: requests produce exactly the tokens they ask for")
    own.add_argument(
        "--percentile-metrics", default=",".join(LATENCIES), metavar="NAME,...", help=f"Latencies to print [{','.join(LATENCIES)}]"
    )
    own.add_argument("--metric-percentiles", default="99", metavar="P,...", help="Percentiles of each latency [99]")
    own.add_argument("--output-json", "--result-filename", dest="output_json", metavar="FILE", help="Write the result as JSON")
    return parser


def main(argv: Sequence[str]) -> int:
    own = build_parser().parse(argv).own
    _check(own)
    percents = parse_percentiles(own.metric_percentiles)
    # Random requests need no model: the server is asked for its name, and refuses ids beyond its vocabulary.
    workload = workload_of(own, own.vocab_size)
    result = asyncio.run(_measure(own, workload, percents))
    _print(own, result, percents)
    write_json(own.output_json, result)
    return 0 if result["completed"] else 1


def _check(own: argparse.Namespace) -> None:
    check_workload_flags(own)
    check_output_path(own.output_json)
    unknown = set(own.percentile_metrics.split(",")) - LATENCIES.keys()
    if unknown:
        raise ConfigError(f"--percentile-metrics must be of {', '.join(LATENCIES)}, got {', '.join(sorted(unknown))!r}")
    if not own.endpoint.startswith("/"):
        raise ConfigError(f"--endpoint must start with /, got {own.endpoint!r}")
    if not own.request_rate > 0:
        raise ConfigError(f"--request-rate must be above 0, got {own.request_rate}")
    if not own.burstiness > 0:
        raise ConfigError(f"--burstiness must be above 0, got {own.burstiness}")
    if own.max_concurrency is not None and own.max_concurrency < 1:
        raise ConfigError(f"--max-concurrency must be at least 1, got {own.max_concurrency}")
    if own.num_warmups < 0:
        raise ConfigError(f"--num-warmups must be at least 0, got {own.num_warmups}")
    if own.vocab_size < 2:
        raise ConfigError(f"--vocab-size must be at least 2, got {own.vocab_size}")


async def _measure(own: argparse.Namespace, workload: Workload, percents: Sequence[float]) -> dict[str, Any]:
    import httpx

    from jaxllm.cli.bench.load import Load, complete, offer
    from jaxllm.cli.bench.serving_metrics import serving_metrics

    base = (own.base_url or f"http://{own.host}:{own.port}").rstrip("/")
    headers = {"Authorization": f"Bearer {own.api_key}"} if own.api_key else {}
    timeout = httpx.Timeout(None, connect=30.0)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=own.max_concurrency or len(workload))
    async with httpx.AsyncClient(timeout=timeout, limits=limits, headers=headers, trust_env=False) as client:
        model = own.model or await _first_model(client, base)
        body = {"model": model, "temperature": own.temperature, "ignore_eos": True}
        url = base + own.endpoint
        for request in workload.requests[: own.num_warmups]:
            outcome = await complete(client, url, body, request)
            if outcome.error is not None:
                raise JaxllmError(f"the first request failed: {outcome.error}")
        load = Load(own.request_rate, own.burstiness, own.max_concurrency, own.workload_seed)
        with _progress(len(workload)) as bar:
            started = time.perf_counter()
            outcomes = await offer(client, url, body, workload.requests, load, done=lambda outcome: bar.update())
            seconds = time.perf_counter() - started
    errors = sorted({outcome.error for outcome in outcomes if outcome.error is not None})
    return {
        "model_id": model,
        "workload": workload.name,
        "num_prompts": len(workload),
        "request_rate": own.request_rate if own.request_rate != float("inf") else "inf",
        "burstiness": own.burstiness,
        "max_concurrency": own.max_concurrency,
        **serving_metrics(outcomes, seconds, percents),
        "errors": errors[:10],
    }


async def _first_model(client: httpx.AsyncClient, base: str) -> str:
    import httpx

    try:
        response = await client.get(base + "/v1/models")
    except httpx.HTTPError as error:
        raise JaxllmError(f"no server answers at {base} ({error or type(error).__name__}); start one with `jaxllm serve`") from None
    if response.status_code != httpx.codes.OK:
        raise JaxllmError(f"{base}/v1/models answers HTTP {response.status_code}: {response.text[:200]}")
    return str(response.json()["data"][0]["id"])


def _progress(total: int) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, desc="Requests", dynamic_ncols=True, disable=not sys.stderr.isatty())


def _print(own: argparse.Namespace, result: dict[str, Any], percents: Sequence[float]) -> None:
    rows = [
        ("Successful requests", result["completed"]),
        ("Failed requests", result["failed"]),
        ("Request rate configured (RPS)", result["request_rate"]),
        ("Maximum request concurrency", result["max_concurrency"] or "none"),
        ("Peak concurrent requests", result["max_concurrent_requests"]),
        ("Benchmark duration (s)", result["duration"]),
        ("Total input tokens", result["total_input_tokens"]),
        ("Total generated tokens", result["total_output_tokens"]),
        ("Request throughput (req/s)", result["request_throughput"]),
        ("Output token throughput (tok/s)", result["output_throughput"]),
        ("Total token throughput (tok/s)", result["total_token_throughput"]),
    ]
    print_rows("Serving Benchmark Result", rows)
    for name in own.percentile_metrics.split(","):
        print(f"{LATENCIES[name]:-^62}")
        label = name.upper()
        for head in ("mean", "median", *map(percent_name, percents)):
            print(f"{f'{head.capitalize()} {label} (ms):':<50}{shown(result[f'{head}_{name}_ms']):>12}")
    print("=" * 62)
    for error in result["errors"]:
        print(f"error: {error}", file=sys.stderr)
