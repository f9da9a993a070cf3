"""Percentiles and the JSON that benchmarks write."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from jaxllm.cli.bench.report import check_output_path, parse_percentiles, percentile, standard_deviation, write_json
from jaxllm.errors import ConfigError


@pytest.mark.parametrize(("percent", "value"), [(0, 1), (25, 1.75), (50, 2.5), (100, 4), (99, 3.97)])
def test_percentiles_interpolate_between_neighbours(percent: float, value: float):
    assert percentile([4, 1, 3, 2], percent) == pytest.approx(value)


def test_nothing_has_no_percentile():
    assert math.isnan(percentile([], 50))


def test_standard_deviation():
    assert standard_deviation([1, 3]) == 1


def test_percentile_lists():
    assert parse_percentiles("50,99.9") == (50, 99.9)
    for text in ("", "a", "101", "-1", "50;99"):
        with pytest.raises(ConfigError, match="--metric-percentiles"):
            parse_percentiles(text)


def test_results_are_strict_json(tmp_path: Path):
    path = tmp_path / "out.json"

    write_json(str(path), {"a": math.nan, "b": [math.inf, 1.5], "c": {"d": (1, "x")}})

    assert json.loads(path.read_text(), parse_constant=pytest.fail) == {"a": None, "b": [None, 1.5], "c": {"d": [1, "x"]}}


def test_a_result_that_cannot_be_written_is_found_before_measuring(tmp_path: Path):
    check_output_path(str(tmp_path / "new.json"))
    check_output_path(None)
    with pytest.raises(ConfigError, match="no folder"):
        check_output_path(str(tmp_path / "missing" / "out.json"))
