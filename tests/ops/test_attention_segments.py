"""Attention within segments against a dense softmax, for every kind of mask."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.ops.attention.segments import Segments, attend_segments
from jaxllm.runner.mesh import make_mesh
from jaxllm.specs import AttendSpec

LENGTHS = (1, 60, 130, 7, 200)
PADDING = 13


def segments_of(lengths: tuple[int, ...], padding: int) -> Segments:
    rows = np.repeat(np.arange(len(lengths) + 1), [*lengths, padding]).astype(np.int32)
    ends = np.cumsum(lengths)
    index = np.arange(len(rows))
    real = rows < len(lengths)
    firsts = np.where(real, (ends - lengths)[np.minimum(rows, len(lengths) - 1)], index)
    last = np.where(real, ends[np.minimum(rows, len(lengths) - 1)], index)
    return Segments(*(jnp.asarray(x, jnp.int32) for x in (rows, firsts, last, ends[-1])))


def dense(q: np.ndarray, k: np.ndarray, v: np.ndarray, rows: np.ndarray, spec: AttendSpec, bias: np.ndarray | None = None) -> np.ndarray:
    group = q.shape[1] // k.shape[1]
    scores = np.einsum("qhd,khd->hqk", q, np.repeat(k, group, 1)) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * np.tanh(scores / spec.softcap)
    distance = np.arange(len(rows))[:, None] - np.arange(len(rows))[None]
    if bias is not None:
        most = bias.shape[1] // 2
        scores = scores + bias[:, np.clip(-distance, -most, most) + most]
    visible = rows[:, None] == rows[None]
    if spec.causal:
        visible &= distance >= 0
    if spec.window is not None:
        visible &= np.abs(distance) < spec.window
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), np.repeat(v, group, 1))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (20, None), (300, 5.0)])
def test_equals_dense_attention_within_each_segment(causal: bool, window: int | None, softcap: float | None) -> None:
    segments = segments_of(LENGTHS, PADDING)
    tokens = sum(LENGTHS) + PADDING
    generator = np.random.default_rng(1)
    q, k, v = (generator.standard_normal((tokens, heads, 8)).astype(np.float32) for heads in (4, 2, 2))
    spec = AttendSpec(0.4, window, softcap, causal=causal)

    found = jax.jit(lambda q, k, v: attend_segments(segments, make_mesh(1), "model", q, k, v, None, spec)[0])(q, k, v)

    real = sum(LENGTHS)
    assert np.abs(np.asarray(found)[:real] - dense(q, k, v, np.asarray(segments.rows), spec)[:real]).max() < 1e-5


def test_biases_go_by_distance_as_far_as_their_table_does() -> None:
    segments = segments_of(LENGTHS, PADDING)
    generator = np.random.default_rng(1)
    q, k, v = (generator.standard_normal((sum(LENGTHS) + PADDING, 4, 8)).astype(np.float32) for _ in range(3))
    bias, spec = generator.standard_normal((4, 2 * 40 + 1)).astype(np.float32), AttendSpec(0.4, causal=False)

    found, _ = attend_segments(segments, make_mesh(1), "model", q, k, v, None, spec, bias=jnp.asarray(bias))

    real = sum(LENGTHS)
    assert np.abs(np.asarray(found)[:real] - dense(q, k, v, np.asarray(segments.rows), spec, bias)[:real]).max() < 1e-5


def test_segments_lie_where_the_first_tokens_say() -> None:
    starts = jnp.asarray(np.cumsum([0, *LENGTHS]), jnp.int32)
    jax.tree.map(np.testing.assert_array_equal, Segments.of(starts, sum(LENGTHS) + PADDING), segments_of(LENGTHS, PADDING))


def test_what_is_not_finite_stays_in_its_segment() -> None:
    segments = segments_of((5, 5), 6)
    q = k = jnp.ones((16, 2, 8), jnp.float32)
    v = q.at[7].set(jnp.inf)

    found = np.asarray(attend_segments(segments, make_mesh(1), "model", q, k, v, None, AttendSpec(1.0, causal=False))[0])

    assert np.allclose(found[:5], 1.0)
    assert np.isnan(found[7]).all()
