"""Benchmark workloads: random ones are reproducible, files are read as they are, mistakes are found early."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from jaxllm.cli.bench.workload import BenchRequest, Workload, add_workload_flags, load_workload, random_workload, workload_of
from jaxllm.errors import ConfigError

FILE = {"seed": 1, "a": [{"prompt": [11, 12], "out": 3}], "b": [{"prompt": [1], "out": 1}, {"prompt": [2, 3], "out": 5}]}


def write(folder: Path, content: Any) -> str:
    path = folder / "workload.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def given(*argv: str) -> Workload:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_workload_flags(parser.add_argument_group("options"))
    return workload_of(parser.parse_args(argv), 100)


def test_random_workloads_repeat_with_their_seed():
    first, second = (random_workload(5, 8, 3, vocab_size=100, seed=7) for _ in range(2))

    assert first == second
    assert first != random_workload(5, 8, 3, vocab_size=100, seed=8)


def test_random_prompts_have_the_asked_lengths_and_a_shared_prefix():
    workload = random_workload(20, 100, 50, vocab_size=1000, prefix_len=5, range_ratio=0.2).requests

    assert len({tuple(request.prompt[:5]) for request in workload}) == 1
    assert len({tuple(request.prompt[5:10]) for request in workload}) == 20
    assert all(85 <= len(request.prompt) <= 125 and 40 <= request.out <= 60 for request in workload)
    assert all(0 <= token < 1000 for request in workload for token in request.prompt)


def test_tiny_vocabularies_work():
    assert set(random_workload(1, 50, 1, vocab_size=2).requests[0].prompt) <= {0, 1}


def test_files_are_read_as_they_are(tmp_path: Path):
    workload = load_workload(write(tmp_path, FILE), "b")

    assert workload.requests == [BenchRequest([1], 1), BenchRequest([2, 3], 5)]


def test_a_single_list_needs_no_name(tmp_path: Path):
    assert load_workload(write(tmp_path, {"only": FILE["a"]})).name == "only"


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (FILE, None, "--workload-name: a, b"),
        (FILE, "z", "no list 'z'; choose one with --workload-name: a, b"),
        ("nonsense", "a", "must hold lists of objects"),
        ([1], "a", "must hold lists of objects"),
        ({"a": [{"prompt": [1]}]}, "a", "missing required field `out`"),
        ({"a": [{"prompt": "text", "out": 1}]}, "a", "Expected `array`"),
        ({"a": []}, "a", "length >= 1"),
        ({"a": [{"prompt": [], "out": 1}]}, "a", "length >= 1"),
    ],
)
def test_wrong_files_say_what_is_wrong(tmp_path: Path, content: Any, name: str | None, message: str):
    with pytest.raises(ConfigError, match=message):
        load_workload(write(tmp_path, content), name)


def test_flags_choose_the_workload(tmp_path: Path):
    assert len(given("--num-prompts", "2").requests) == 2
    assert len(given("--random-input-len", "9", "--num-prompts", "1").requests[0].prompt) == 9
    assert given("--workload", write(tmp_path, FILE), "--workload-name", "a").name == "a"


@pytest.mark.parametrize(
    "argv",
    [["--num-prompts", "0"], ["--input-len", "0"], ["--random-range-ratio", "1"], ["--workload", "/nowhere"], ["--workload-name", "a"]],
)
def test_impossible_flags_are_refused(argv: list[str]):
    with pytest.raises((argparse.ArgumentError, ConfigError), match=argv[0]):
        given(*argv)
