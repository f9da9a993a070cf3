"""Benchmark workloads: random ones are reproducible, files are read as they are, mistakes are found early."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from jaxllm.cli.bench.workload import (
    BenchRequest,
    add_workload_flags,
    check_fits,
    check_workload_flags,
    load_workload,
    random_workload,
    workload_of,
)
from jaxllm.errors import ConfigError

FILE = {"seed": 1, "a": [{"prompt": [11, 12], "out": 3}], "b": [{"prompt": [1], "out": 1}, {"prompt": [2, 3], "out": 5}]}


def write(folder: Path, content: Any) -> str:
    path = folder / "workload.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def flags(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_workload_flags(parser.add_argument_group("options"), num_prompts=2, input_len=4, output_len=3)
    own = parser.parse_args(argv)
    check_workload_flags(own)
    return own


def test_random_workloads_repeat_with_their_seed():
    first, second = (random_workload(5, 8, 3, vocab_size=100, seed=7) for _ in range(2))

    assert first == second
    assert first != random_workload(5, 8, 3, vocab_size=100, seed=8)


def test_random_prompts_have_the_asked_lengths_and_a_shared_prefix():
    workload = random_workload(20, 100, 50, vocab_size=1000, prefix_len=5, range_ratio=0.2)

    assert len({tuple(request.prompt[:5]) for request in workload}) == 1
    assert len({tuple(request.prompt[5:10]) for request in workload}) == 20
    assert all(85 <= len(request.prompt) <= 125 and 40 <= request.output_len <= 60 for request in workload)
    assert all(0 <= token < 1000 for request in workload for token in request.prompt)


def test_tiny_vocabularies_work():
    assert set(random_workload(1, 50, 1, vocab_size=2).requests[0].prompt) <= {0, 1}


def test_files_are_read_as_they_are(tmp_path: Path):
    workload = load_workload(write(tmp_path, FILE), "b")

    assert workload.requests == (BenchRequest([1], 1), BenchRequest([2, 3], 5))
    assert (workload.num_prompt_tokens, workload.num_output_tokens, workload.longest) == (3, 6, 7)


def test_a_single_list_needs_no_name(tmp_path: Path):
    assert load_workload(write(tmp_path, {"only": FILE["a"]})).name == "only"


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (FILE, None, "--workload-name; there are a, b"),
        (FILE, "z", "no list 'z'; there are a, b"),
        ("nonsense", "a", "cannot be read"),
        ([1], "a", "cannot be read"),
        ({"a": [{"prompt": [1]}]}, "a", "must hold objects"),
        ({"a": [{"prompt": "text", "out": 1}]}, "a", "must hold objects"),
        ({"a": []}, "a", "at least one token"),
        ({"a": [{"prompt": [], "out": 1}]}, "a", "at least one token"),
    ],
)
def test_wrong_files_say_what_is_wrong(tmp_path: Path, content: Any, name: str | None, message: str):
    with pytest.raises(ConfigError, match=message):
        load_workload(write(tmp_path, content), name)


def test_flags_choose_the_workload(tmp_path: Path):
    assert len(workload_of(flags(), 100)) == 2
    assert workload_of(flags("--random-input-len", "9"), 100).num_prompt_tokens == 18
    assert workload_of(flags("--workload", write(tmp_path, FILE), "--workload-name", "a"), 100).name == "a"


@pytest.mark.parametrize(
    "argv",
    [["--num-prompts", "0"], ["--input-len", "0"], ["--random-range-ratio", "1"], ["--workload", "/nowhere"], ["--workload-name", "a"]],
)
def test_impossible_flags_are_refused(argv: list[str]):
    with pytest.raises(ConfigError, match=argv[0]):
        flags(*argv)


def test_requests_longer_than_the_engine_takes_are_refused():
    check_fits([BenchRequest([1, 2], 3)], 5)
    with pytest.raises(ConfigError, match="needs 5 positions"):
        check_fits([BenchRequest([1, 2], 3)], 4)
