"""How results are shown: lines for people, JSON for programs, percentiles for both."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxllm.errors import ConfigError


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` % lie, interpolated linearly between neighbours; nan without values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def standard_deviation(values: Sequence[float]) -> float:
    centre = mean(values)
    return math.sqrt(mean([(value - centre) ** 2 for value in values])) if values else math.nan


def parse_percentiles(text: str) -> tuple[float, ...]:
    """`"50,99"` as numbers. Raises ConfigError for anything outside of [0, 100]."""
    try:
        percents = tuple(float(part) for part in text.split(","))
    except ValueError:
        percents = ()
    if not percents or not all(0 <= percent <= 100 for percent in percents):
        raise ConfigError(f"--metric-percentiles must be numbers from 0 to 100 separated by commas, got {text!r}")
    return percents


def percent_name(percent: float) -> str:
    return f"p{percent:g}"


def check_output_path(path: str | None) -> None:
    """Raises ConfigError where a result could not be written, before it is measured."""
    if path and not Path(path).expanduser().resolve().parent.is_dir():
        raise ConfigError(f"--output-json {path}: there is no folder {Path(path).parent}")


def write_json(path: str | None, result: Mapping[str, Any]) -> None:
    """Write the result; numbers that are not finite become null."""
    if path:
        Path(path).expanduser().write_text(json.dumps(_finite(result), indent=2) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def print_rows(title: str, rows: Sequence[tuple[str, Any]], width: int = 50) -> None:
    """A titled block of names and values, values right of a fixed column."""
    print(f"{f' {title} ':=^{width + 12}}")
    for name, value in rows:
        print(f"{name + ':':<{width}}{shown(value):>12}")


def shown(value: Any) -> str:
    if isinstance(value, float):
        return "n/a" if math.isnan(value) else f"{value:.2f}"
    return str(value)
