"""docs/models.md is the table of the architectures that there are."""

from __future__ import annotations

import re
from pathlib import Path

from jaxllm.models.registry import FAMILIES


def test_the_table_of_models_lists_every_architecture() -> None:
    table = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    listed = set(re.findall(r"^\| (\w+) \|", table, re.MULTILINE)) - {"architecture"}
    assert listed == set(FAMILIES), "run scripts/model_table.py"
