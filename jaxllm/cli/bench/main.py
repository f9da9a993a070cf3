"""`jaxllm bench COMMAND`: picks the benchmark, which loads when it is called."""

from __future__ import annotations

from collections.abc import Sequence

from jaxllm.cli.main import dispatch

# Benchmark -> (module with `main(argv) -> exit status`, what it measures).
BENCHMARKS = {
    "latency": ("jaxllm.cli.bench.latency", "Time to finish one batch of equal requests"),
    "throughput": ("jaxllm.cli.bench.throughput", "Tokens per second when all requests are offered at once"),
    "serve": ("jaxllm.cli.bench.serve", "Latencies and throughput of a running server at a given load"),
    "startup": ("jaxllm.cli.bench.startup", "Time from the command to the first served token, without and with a compilation cache"),
}


def main(argv: Sequence[str]) -> int:
    return dispatch(
        "jaxllm bench", "Benchmarks that print JSON, and how near they come to the hardware's measured limits.", BENCHMARKS, argv
    )
