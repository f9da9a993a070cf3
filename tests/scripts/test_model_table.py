"""docs/models.md is the table of the architectures that there are."""

from __future__ import annotations

import re
from pathlib import Path

from jaxllm.models.registry import FAMILIES
from tests.golden.pooling_cases import CASES


def test_the_table_of_models_lists_every_architecture() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text("utf-8")
    generating, pooled = (re.findall(r"^\| (.+?) \|", part, re.MULTILINE) for part in page.split("## Pooling models"))
    assert set(generating) - {"architecture"} == set(FAMILIES), "run scripts/model_table.py"
    named = {name.removeprefix("embeddings of ").removesuffix(" of two tokens") for name in pooled}
    assert named >= {case.architecture for case in CASES.values()}, "run scripts/model_table.py"
    assert {"encoder of T5ForConditionalGeneration", "encoder of BartForConditionalGeneration"} <= named
