"""What the benchmarks of an engine in this process share: their flags, warm-up, and the sections of their results."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jaxllm.cli.bench import roofline
from jaxllm.cli.bench.report import check_output_path
from jaxllm.cli.bench.workload import BenchRequest
from jaxllm.cli.parser import Arguments, CommandParser
from jaxllm.config import CONFIG_GROUPS, EngineConfig

if TYPE_CHECKING:
    from jaxllm.cli.bench.engine import BenchEngine, Run


def build_parser(command: str, summary: str) -> CommandParser:
    parser = CommandParser(command, summary, groups=CONFIG_GROUPS, positional_model=True)
    parser.own.add_argument("--output-json", metavar="FILE", help="Write the result as JSON")
    parser.own.add_argument("--no-roofline", action="store_true", help="Do not measure the hardware's limits, and print no ratios to them")
    return parser


@dataclass
class Session:
    """A started engine, and the limits of the hardware under it."""

    engine: BenchEngine
    cost: roofline.ModelCost | None
    limits: dict[str, Any] | None
    devices: int
    own: argparse.Namespace = field(repr=False)

    def ratios(self, run: Run, requests: Sequence[BenchRequest]) -> dict[str, float]:
        """Ratios to the limits; {} with --no-roofline."""
        if self.cost is None or self.limits is None:
            return {}
        return roofline.ratios(
            self.cost,
            self.limits,
            requests,
            seconds=run.seconds,
            num_steps=run.num_steps,
            num_cached_tokens=run.num_cached_tokens,
            devices=self.devices,
            dtype=self.engine.info.dtype,
        )

    def sections(self, run: Run, requests: Sequence[BenchRequest]) -> dict[str, Any]:
        """The parts of a result that every benchmark has."""
        return {"engine": self.engine.describe(), "run": run.as_json(), "limits": self.limits, "roofline": self.ratios(run, requests)}


@contextmanager
def open_session(args: Arguments) -> Iterator[Session]:
    """Measure the hardware, start the engine, and close it at the end."""
    # Only a benchmark that runs pays for the engine's imports.
    from jaxllm.cli.bench.engine import BenchEngine

    own = args.own
    check_output_path(own.output_json)
    config = EngineConfig.from_options(**args.only(CONFIG_GROUPS))
    wanted = not own.no_roofline
    # Before the engine takes the device.
    limits = roofline.measure_hardware() if wanted else None
    with BenchEngine(config) as engine:
        cost = roofline.model_cost(config, engine.info.dtype) if wanted else None
        yield Session(engine, cost, limits, config.parallel.tensor_parallel_size, own)


def warn_of_compilations(run: Run) -> None:
    if run.num_compilations:
        print(f"warning: {run.num_compilations} programs were compiled during the measured run; its figures include that", file=sys.stderr)


def cost_rows(run: Run, ratios: dict[str, float]) -> list[tuple[str, Any]]:
    """The lines about what a run cost."""
    rows: list[tuple[str, Any]] = [
        ("Engine steps", run.num_steps),
        ("Host time per step (ms)", run.host_ms_per_step),
        ("Padding waste (%)", 100 * run.padding_waste),
        ("Programs compiled during the run (0 is right)", run.num_compilations),
    ]
    if ratios:
        rows += [
            ("Memory traffic (GB/s)", ratios["bytes_per_second"] / 1e9),
            ("  of the measured limit (MBU, %)", 100 * ratios["mbu"]),
            ("Operations (GFLOP/s)", ratios["flops_per_second"] / 1e9),
            ("  of the measured limit (MFU, %)", 100 * ratios["mfu"]),
        ]
    return rows
