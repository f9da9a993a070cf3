"""`jaxllm bench COMMAND`: picks the benchmark, which loads when it is called."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Sequence

from jaxllm.errors import ConfigError

# Benchmark -> (module with `main(argv) -> exit status`, what it measures).
BENCHMARKS = {
    "latency": ("jaxllm.cli.bench.latency", "Time to finish one batch of equal requests"),
    "throughput": ("jaxllm.cli.bench.throughput", "Tokens per second when all requests are offered at once"),
    "serve": ("jaxllm.cli.bench.serve", "Latencies and throughput of a running server at a given load"),
    "startup": ("jaxllm.cli.bench.startup", "Time from the command to the first served token, without and with a compilation cache"),
}


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        width = max(map(len, BENCHMARKS))
        lines = ["usage: jaxllm bench COMMAND [options]", "", "commands:"]
        lines += [f"  {name:<{width}}  {summary}" for name, (_, summary) in BENCHMARKS.items()]
        print("\n".join([*lines, "", "`jaxllm bench COMMAND --help` explains a benchmark."]))
        return 0 if argv else 2
    name, *rest = argv
    if name not in BENCHMARKS:
        near = difflib.get_close_matches(name, BENCHMARKS, n=1)
        raise ConfigError(f"no benchmark {name!r}; " + (f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(BENCHMARKS)}"))
    module = importlib.import_module(BENCHMARKS[name][0])
    status: int = module.main(rest)
    return status
