"""`jaxllm bench latency`: one batch of equal requests, again and again."""

from __future__ import annotations

from collections.abc import Sequence

from jaxllm.cli.bench.report import engine_parser, mean, percentile, report
from jaxllm.cli.bench.workload import random_workload
from jaxllm.cli.parser import CommandParser, at_least

PERCENTILES = (10, 25, 50, 75, 90, 99)


def build_parser() -> CommandParser:
    parser = engine_parser(
        "bench latency",
        "Time one batch of equal requests from start to end, again and again, on an engine in this process.\nGreedy, exact lengths.",
    )
    for flag, low, default, text in (
        ("--input-len", 1, 32, "Prompt length in tokens"),
        ("--output-len", 1, 128, "Output length in tokens"),
        ("--batch-size", 1, 8, "Requests of the batch"),
        ("--num-iters-warmup", 0, 10, "Batches before those that are measured"),
        ("--num-iters", 1, 30, "Measured batches"),
    ):
        parser.own.add_argument(flag, type=at_least(low), default=default, metavar="N", help=f"{text} [{default}]")
    return parser


def main(argv: Sequence[str]) -> int:
    args = build_parser().parse(argv)
    own = args.own
    # Only a benchmark that runs pays for the engine's imports.
    from jaxllm.cli.bench.engine import open_engine

    with open_engine(args) as engine:
        _, requests = random_workload(own.batch_size, own.input_len, own.output_len, vocab_size=engine.info.vocab_size)
        for _ in range(own.num_iters_warmup):
            engine.run(requests)
        runs = [engine.run(requests) for _ in range(own.num_iters)]
        seconds = [run.seconds for run in runs]
        first = mean([mean(run.first_token_seconds) for run in runs])
        median = sorted(runs, key=lambda run: run.seconds)[len(runs) // 2]
        result = {
            "batch_size": own.batch_size,
            "input_len": own.input_len,
            "output_len": own.output_len,
            "avg_latency": mean(seconds),
            "latencies": seconds,
            "percentiles": {str(percent): percentile(seconds, percent) for percent in PERCENTILES},
            "mean_ttft_ms": 1000 * first,
            "mean_tpot_ms": 1000 * (mean(seconds) - first) / max(1, own.output_len - 1),
            "output_tokens_per_second": own.batch_size * own.output_len / mean(seconds),
            "num_compilations": sum(run.num_compilations for run in runs),
            **engine.sections(median, requests),
        }
    report("Latency", result, own.output_json)
    return 0
