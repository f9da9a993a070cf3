"""What the tuner writes is what kernels read, and it measures where there is something to measure."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pallas_kernels import tuned
from pallas_kernels.devices import DEVICES
from pallas_kernels.quantized_matmul import tuning as quantized
from pallas_kernels.ragged_paged_attention import tuning as attention

SCRIPT = Path(__file__).parents[2] / "scripts" / "tune_kernels.py"
V6E = DEVICES["v6e"]


@pytest.fixture(scope="module")
def tuner():
    spec = importlib.util.spec_from_file_location("tune_kernels", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["tune_kernels"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["tune_kernels"]


def recorded(case):
    """The case with calls that say which blocks they are of, and its shape's blocks measured so far."""
    stages = tuple(dataclasses.replace(stage, call=lambda blocks: lambda: blocks) for stage in case.stages)
    return dataclasses.replace(case, stages=stages)


def test_what_was_faster_is_what_the_kernel_chooses_from_then_on(tuner, tmp_path, monkeypatch):
    monkeypatch.setattr(tuned, "TABLE", tmp_path / "tuned_blocks.json")
    case = recorded(tuner.quantized_case(V6E, 8, 1024, 256, "int4", 128))
    shape = quantized.Shape(rows=8, num_in=1024, num_out=256, group=128, bits=4, tables=2, rounds=False)
    assert shape.key == case.key
    before = quantized.choose_blocks(shape, V6E)

    tuner.tune([case], V6E.kind, lambda call: 1.0 if call().inputs == 512 else 2.0, tuned.TABLE)

    assert before.inputs != 512
    tuned._read.cache_clear()
    assert quantized.choose_blocks(shape, V6E).inputs == 512
    assert quantized.choose_blocks(shape, DEVICES["v5e"]) == before
    assert quantized.choose_blocks(shape, V6E, exceptions=False) == before


def test_decode_and_prefill_of_attention_are_tuned_one_after_the_other(tuner, tmp_path, monkeypatch):
    monkeypatch.setattr(tuned, "TABLE", tmp_path / "tuned_blocks.json")
    case = recorded(tuner.attention_case(V6E, 4, 2, context=512))
    times = {"decode_pages": 2, "decode_compute_pages": 1, "query_tile": 64}

    def seconds(call):
        return 1.0 + sum(getattr(call(), field) != value for field, value in times.items())

    tuner.tune([case], V6E.kind, seconds, tuned.TABLE)

    (fields,) = json.loads(tuned.TABLE.read_text())["ragged_paged_attention"][V6E.kind].values()
    assert times.items() <= fields.items()
    attention.Blocks(**fields)


def test_noise_keeps_the_default_and_removes_an_entry_that_no_longer_wins(tuner, tmp_path):
    table = tmp_path / "tuned_blocks.json"
    case = recorded(tuner.quantized_case(V6E, 8, 1024, 256, "int8", 128))
    other = {"rows": 16, "outputs": 128, "inputs": 128}
    table.write_text(json.dumps({"quantized_matmul": {V6E.kind: {case.key: other, "another shape": other}}}))

    tuner.tune([case], V6E.kind, lambda call: 1.0 if call() == case.default else 0.98, table)

    assert json.loads(table.read_text()) == {"quantized_matmul": {V6E.kind: {"another shape": other}}}


def test_blocks_that_do_not_compile_are_passed_over(tuner, tmp_path, capsys):
    table = tmp_path / "tuned_blocks.json"
    case = recorded(tuner.quantized_case(V6E, 8, 1024, 256, "int8", 128))

    def seconds(call):
        if call().inputs == 512:
            raise RuntimeError("out of vector memory")
        return 1.0

    tuner.tune([case], V6E.kind, seconds, table)
    assert "out of vector memory" in capsys.readouterr().out
    assert json.loads(table.read_text()) == {"quantized_matmul": {}}


def test_the_measured_call_runs_the_kernel(tuner):
    case = tuner.quantized_case(V6E, 4, 256, 128, "int8", 128, interpret=True)
    assert tuner.measure(case.stages[0].call(case.default)) > 0


def test_without_a_tpu_one_line_says_so():
    command = [sys.executable, str(SCRIPT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    assert done.returncode == 1
    assert done.stderr.strip().splitlines() == ["tune_kernels measures TPU kernels on a TPU, and jax finds a cpu here (cpu)"]
