"""Pooling of segments against plain numpy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.layers.pooling import pool
from jaxllm.ops.attention.segments import Segments

LENGTHS = (1, 5, 3)
# Two rows without tokens and three padding tokens at the end.
STARTS = np.array([0, 1, 6, 9, 9, 9], np.int32)
HIDDEN = np.random.default_rng(0).standard_normal((12, 4)).astype(np.float32)


def expected(kind: str, rows: np.ndarray) -> np.ndarray:
    weights = np.arange(1, len(rows) + 1)[:, None]
    return {
        "cls": lambda: rows[0],
        "last": lambda: rows[-1],
        "mean": lambda: rows.mean(0),
        "max": lambda: rows.max(0),
        "mean_sqrt_len": lambda: rows.sum(0) / np.sqrt(len(rows)),
        "weighted_mean": lambda: (rows * weights).sum(0) / weights.sum(),
    }[kind]()


SINGLE = ("cls", "last", "mean", "max", "mean_sqrt_len", "weighted_mean")


@pytest.mark.parametrize("kinds", [*((kind,) for kind in SINGLE), ("cls", "max", "mean")])
def test_each_pooling_reads_its_own_segment(kinds: tuple[str, ...]) -> None:
    rows = np.repeat([0, 1, 2, 5], [*LENGTHS, 3]).astype(np.int32)
    firsts = np.concatenate([STARTS[rows[:9]], np.arange(9, 12)]).astype(np.int32)
    segments = Segments(jnp.asarray(rows), jnp.asarray(firsts), jnp.asarray(firsts), jnp.int32(9))

    found = np.asarray(pool(jnp.asarray(HIDDEN), jnp.asarray(STARTS), segments, kinds))

    for i, length in enumerate(LENGTHS):
        part = HIDDEN[STARTS[i] : STARTS[i] + length]
        assert np.allclose(found[i], np.concatenate([expected(kind, part) for kind in kinds]), atol=1e-6)
