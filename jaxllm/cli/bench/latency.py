"""`jaxllm bench latency`: one batch of equal requests, again and again."""

from __future__ import annotations

from collections.abc import Sequence

from jaxllm.cli.bench.in_process import build_parser as build_common_parser
from jaxllm.cli.bench.in_process import cost_rows, open_session, warn_of_compilations
from jaxllm.cli.bench.report import mean, percentile, print_rows, write_json
from jaxllm.cli.bench.workload import random_workload
from jaxllm.cli.parser import CommandParser
from jaxllm.errors import ConfigError

PERCENTILES = (10, 25, 50, 75, 90, 99)


def build_parser() -> CommandParser:
    parser = build_common_parser(
        "bench latency",
        "Time one batch of equal requests from start to end, again and again, on an engine in this process.\nGreedy, exact lengths.",
    )
    for flag, default, text in (
        ("--input-len", 32, "Prompt length in tokens"),
        ("--output-len", 128, "Output length in tokens"),
        ("--batch-size", 8, "Requests of the batch"),
        ("--num-iters-warmup", 10, "Batches before those that are measured"),
        ("--num-iters", 30, "Measured batches"),
    ):
        parser.own.add_argument(flag, type=int, default=default, metavar="N", help=f"{text} [{default}]")
    return parser


def main(argv: Sequence[str]) -> int:
    args = build_parser().parse(argv)
    own = args.own
    for name, low in (("input_len", 1), ("output_len", 1), ("batch_size", 1), ("num_iters", 1), ("num_iters_warmup", 0)):
        if getattr(own, name) < low:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {low}, got {getattr(own, name)}")
    with open_session(args) as session:
        workload = random_workload(own.batch_size, own.input_len, own.output_len, vocab_size=session.engine.info.vocab_size)
        for _ in range(own.num_iters_warmup):
            session.engine.run(workload.requests)
        runs = [session.engine.run(workload.requests) for _ in range(own.num_iters)]
        compiled = [run for run in runs if run.num_compilations]
        for run in compiled:
            warn_of_compilations(run)
        seconds = [run.seconds for run in runs]
        median = sorted(runs, key=lambda run: run.seconds)[len(runs) // 2]
        first = mean([mean(run.first_token_seconds) for run in runs])
        per_token = (mean(seconds) - first) / max(1, own.output_len - 1)
        result = {
            "avg_latency": mean(seconds),
            "latencies": seconds,
            "percentiles": {str(percent): percentile(seconds, percent) for percent in PERCENTILES},
            "mean_ttft_ms": 1000 * first,
            "mean_tpot_ms": 1000 * per_token,
            "batch_size": own.batch_size,
            "input_len": own.input_len,
            "output_len": own.output_len,
            "output_tokens_per_second": own.batch_size * own.output_len / mean(seconds),
            "num_compilations": sum(run.num_compilations for run in runs),
            **session.sections(median, workload.requests),
        }
        print_rows(
            "Latency",
            [
                ("Batch", f"{own.batch_size} x {own.input_len} in / {own.output_len} out"),
                ("Mean latency (s)", mean(seconds)),
                *((f"  {percent} % percentile (s)", percentile(seconds, percent)) for percent in PERCENTILES),
                ("Mean time to first token (ms)", 1000 * first),
                ("Mean time per output token (ms)", 1000 * per_token),
                ("Output tokens per second", result["output_tokens_per_second"]),
                *cost_rows(median, session.ratios(median, workload.requests)),
            ],
        )
        write_json(own.output_json, result)
    return 0
