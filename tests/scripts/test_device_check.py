"""The device check runs where there is no device, in a small shape: what it would print on one has the right form."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "device_check.py"


@pytest.mark.heavy
def test_kernels_and_engine_are_checked_and_measured(tmp_path):
    file = tmp_path / "result.json"
    command = [sys.executable, str(SCRIPT), "--tiny", "--output", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(file.read_text())

    assert {row["backend"] for row in found["attention"]} == {"xla"}
    assert all(row["error"] < 0.02 for row in found["attention"])
    assert len(found["products"]) == 7
    assert all(row["error"] < 0.02 and row["share_64"] > 0 for row in found["products"])
    assert all(row["error"] < 0.02 and row["share_64"] > 0 for row in found["experts"])
    assert [row["batch"] for row in found["engine"]["decode"]] == [1, 4]
    shares = [row["share_of_bandwidth"] for row in found["engine"]["decode"]] + [found["engine"]["prefill"]["mfu"]]
    assert all(share > 0 for share in shares)
    assert "decode of  4:" in done.stdout
