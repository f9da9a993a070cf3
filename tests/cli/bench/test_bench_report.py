"""Percentiles, and what benchmarks print and write."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import pytest

from jaxllm.cli.bench.report import add_output_flag, percentile, report


@pytest.mark.parametrize(("percent", "value"), [(0, 1), (25, 1.75), (50, 2.5), (100, 4), (99, 3.97)])
def test_percentiles_interpolate_between_neighbours(percent: float, value: float):
    assert percentile([4, 1, 3, 2], percent) == pytest.approx(value)


def test_nothing_has_no_percentile():
    assert math.isnan(percentile([], 50))


def test_results_are_lines_of_numbers_and_strict_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "out.json"

    report("Figures", {"a": math.nan, "b": [math.inf, 1.5], "c": {"d": 2.345, "e": "x"}}, path)

    assert json.loads(path.read_text(), parse_constant=pytest.fail) == {"a": None, "b": [None, 1.5], "c": {"d": 2.345, "e": "x"}}
    title, *lines = capsys.readouterr().out.splitlines()
    assert "Figures" in title
    assert [line.split() for line in lines] == [["a:", "nan"], ["c.d:", "2.35"], ["c.e:", "x"]]


def test_a_result_that_cannot_be_written_is_found_before_measuring(tmp_path: Path):
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_output_flag(parser.add_argument_group("options"))

    assert parser.parse_args(["--output-json", str(tmp_path / "new.json")]).output_json == tmp_path / "new.json"
    with pytest.raises(argparse.ArgumentError, match="no folder"):
        parser.parse_args(["--output-json", str(tmp_path / "missing" / "out.json")])
