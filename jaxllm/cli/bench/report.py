"""The flags that benchmarks share, and how results are shown: lines for people and JSON for programs, under the same names."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from jaxllm.cli.parser import CommandParser
from jaxllm.config import CONFIG_GROUPS


def engine_parser(command: str, summary: str) -> CommandParser:
    """The parser of a benchmark that starts an engine."""
    parser = CommandParser(command, summary, groups=CONFIG_GROUPS, positional_model=True)
    add_output_flag(parser.own)
    parser.own.add_argument("--no-roofline", action="store_true", help="Do not measure the hardware's limits, and print no ratios to them")
    return parser


def add_output_flag(own: argparse._ArgumentGroup) -> None:
    own.add_argument("--output-json", type=_new_file, metavar="FILE", help="Write the result as JSON")


def _new_file(path: str) -> Path:
    """Found to be writable before anything is measured."""
    file = Path(path).expanduser()
    if not file.resolve().parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {file.parent}")
    return file


def report(title: str, result: Mapping[str, Any], path: Path | None) -> None:
    """Print the numbers of a result, one a line, and write all of it; numbers that are not finite are null in JSON."""
    print(f"{f' {title} ':=^64}")
    for name, value in _flat(result):
        print(f"{name + ':':<50}{f'{value:.2f}' if isinstance(value, float) else value!s:>14}")
    if path is not None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")


def _flat(result: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in result.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif not isinstance(value, (list, tuple)):
            yield prefix + name, value


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` % lie, interpolated linearly between neighbours; nan without values."""
    # Only a benchmark that runs pays for the import.
    import numpy as np

    return float(np.percentile(values, percent)) if values else math.nan
