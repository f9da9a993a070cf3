"""Every pooling architecture against transformers, in float32, on tiny random checkpoints: prompts of 1, 9 and 150 tokens in one step."""

from __future__ import annotations

import pytest

from tests.golden.pooling_cases import CASES
from tests.runner.pooling import largest_error

MAX_DELTA = 1e-4


@pytest.mark.parametrize(
    ("name", "shards"),
    [*((name, 1) for name in CASES), *((name, 2) for name in ("bert_cross_encoder", "modernbert", "llama_classify"))],
)
def test_answers_equal_transformers(name: str, shards: int) -> None:
    assert largest_error(CASES[name], shards) < MAX_DELTA
