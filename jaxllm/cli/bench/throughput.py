"""`jaxllm bench throughput`: all requests offered at once to an engine in this process."""

from __future__ import annotations

from collections.abc import Sequence

from jaxllm.cli.bench.report import engine_parser, mean, percentile, report
from jaxllm.cli.bench.workload import add_workload_flags, workload_of
from jaxllm.cli.parser import CommandParser, at_least


def build_parser() -> CommandParser:
    parser = engine_parser(
        "bench throughput", "Offer all requests at once to an engine in this process, and count tokens per second.\nGreedy, exact lengths."
    )
    add_workload_flags(parser.own)
    parser.own.add_argument("--num-warmups", type=at_least(0), default=1, metavar="N", help="Passes before the measured one [1]")
    return parser


def main(argv: Sequence[str]) -> int:
    args = build_parser().parse(argv)
    own = args.own
    # Mistakes in a workload show before anything slow is started; random ones are drawn again from the model's vocabulary.
    workload_of(own, vocab_size=100)
    from jaxllm.cli.bench.engine import open_engine

    with open_engine(args) as engine:
        name, requests = workload_of(own, engine.info.vocab_size)
        for _ in range(own.num_warmups):
            engine.run(requests)
        run = engine.run(requests)
        total = run.num_prompt_tokens + run.num_output_tokens
        result = {
            "workload": name,
            "num_requests": len(requests),
            "elapsed_time": run.seconds,
            "total_num_tokens": total,
            "total_input_tokens": run.num_prompt_tokens,
            "total_output_tokens": run.num_output_tokens,
            "requests_per_second": len(requests) / run.seconds,
            "tokens_per_second": total / run.seconds,
            "input_tokens_per_second": run.num_prompt_tokens / run.seconds,
            "output_tokens_per_second": run.num_output_tokens / run.seconds,
            "mean_ttft_ms": 1000 * mean(run.first_token_seconds),
            "median_ttft_ms": 1000 * percentile(run.first_token_seconds, 50),
            **engine.sections(run, requests),
        }
    report("Throughput", result, own.output_json)
    return 0
