"""`jaxllm bench throughput`: all requests offered at once to an engine in this process."""

from __future__ import annotations

from collections.abc import Sequence

from jaxllm.cli.bench.in_process import build_parser as build_common_parser
from jaxllm.cli.bench.in_process import cost_rows, open_session, warn_of_compilations
from jaxllm.cli.bench.report import mean, percentile, print_rows, write_json
from jaxllm.cli.bench.workload import add_workload_flags, check_workload_flags, workload_of
from jaxllm.cli.parser import CommandParser
from jaxllm.errors import ConfigError


def build_parser() -> CommandParser:
    parser = build_common_parser(
        "bench throughput", "Offer all requests at once to an engine in this process, and count tokens per second.\nGreedy, exact lengths."
    )
    add_workload_flags(parser.own, num_prompts=1000, input_len=1024, output_len=128)
    parser.own.add_argument("--num-warmups", type=int, default=1, metavar="N", help="Passes over the workload before the measured one [1]")
    return parser


def main(argv: Sequence[str]) -> int:
    args = build_parser().parse(argv)
    own = args.own
    check_workload_flags(own)
    if own.num_warmups < 0:
        raise ConfigError(f"--num-warmups must be at least 0, got {own.num_warmups}")
    with open_session(args) as session:
        workload = workload_of(own, session.engine.info.vocab_size)
        for _ in range(own.num_warmups):
            session.engine.run(workload.requests)
        run = session.engine.run(workload.requests, progress=True)
        warn_of_compilations(run)
        total = run.num_prompt_tokens + run.num_output_tokens
        result = {
            "workload": workload.name,
            "num_requests": len(workload),
            "elapsed_time": run.seconds,
            "total_num_tokens": total,
            "total_input_tokens": run.num_prompt_tokens,
            "total_output_tokens": run.num_output_tokens,
            "requests_per_second": len(workload) / run.seconds,
            "tokens_per_second": total / run.seconds,
            "input_tokens_per_second": run.num_prompt_tokens / run.seconds,
            "output_tokens_per_second": run.num_output_tokens / run.seconds,
            "mean_ttft_ms": 1000 * mean(run.first_token_seconds),
            "median_ttft_ms": 1000 * percentile(run.first_token_seconds, 50),
            **session.sections(run, workload.requests),
        }
        print_rows(
            "Throughput",
            [
                ("Workload", workload.name),
                ("Requests", len(workload)),
                ("Duration (s)", run.seconds),
                ("Input tokens", run.num_prompt_tokens),
                ("  of them from the prefix cache", run.num_cached_tokens),
                ("Output tokens", run.num_output_tokens),
                ("Requests per second", result["requests_per_second"]),
                ("Input tokens per second", result["input_tokens_per_second"]),
                ("Output tokens per second", result["output_tokens_per_second"]),
                ("Total tokens per second", result["tokens_per_second"]),
                *cost_rows(run, session.ratios(run, workload.requests)),
            ],
        )
        write_json(own.output_json, result)
    return 0
