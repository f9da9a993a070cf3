"""Where each layer rounds, and what it leaves alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.layers.embedding import Embedding, project
from jaxllm.layers.mlp import ACTIVATIONS
from jaxllm.layers.norm import Norm
from jaxllm.layers.rope import rotate, rotation
from jaxllm.specs import NormKind, NormSpec, RopeSpec


def normal(*shape: int, dtype: str = "float32", seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def make_norm(kind: NormKind, weight: jax.Array, dtype: str, bias: jax.Array | None = None) -> Norm:
    norm = Norm(NormSpec(kind, 1e-6), weight.shape[0], dtype)
    norm.weight[...] = weight
    if bias is not None and norm.bias is not None:
        norm.bias[...] = bias
    return norm


def test_rms_norm_rounds_before_the_weight_and_gemma_s_after_it() -> None:
    x, weight = normal(3, 64, dtype="bfloat16"), normal(64, dtype="bfloat16", seed=1)
    wide = np.asarray(x, np.float32)
    wide = jnp.asarray(wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6))
    np.testing.assert_array_equal(make_norm("rms", weight, "bfloat16")(x), wide.astype(jnp.bfloat16) * weight)
    after = (wide * (1 + weight.astype(jnp.float32))).astype(jnp.bfloat16)
    np.testing.assert_array_equal(make_norm("rms_plus_one", weight, "bfloat16")(x), after)


def test_norm_survives_activations_whose_square_overflows_the_dtype() -> None:
    x = jnp.full((1, 8), 60000.0, jnp.float16)
    np.testing.assert_allclose(make_norm("rms", jnp.ones(8, "float16"), "float16")(x), 1.0, rtol=1e-3)


def test_layer_norm_centres_scales_and_shifts() -> None:
    x, weight, bias = 3 + normal(4, 32), normal(32, seed=1), normal(32, seed=2)
    centred = np.asarray(x) - np.asarray(x).mean(-1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6) * np.asarray(weight) + np.asarray(bias)
    np.testing.assert_allclose(make_norm("layer", weight, "float32", bias)(x), expected, rtol=1e-5, atol=1e-5)


def test_rotation_keeps_lengths_and_depends_on_distance_only() -> None:
    spec = RopeSpec((1.0, 0.1, 0.01, 0.001))
    q, k = normal(8), normal(8, seed=1)

    def score(at: int, other: int) -> float:
        rotated_q = rotate(q[None, None], rotation(jnp.array([at]), spec))[0, 0]
        rotated_k = rotate(k[None, None], rotation(jnp.array([other]), spec))[0, 0]
        assert jnp.linalg.norm(rotated_q) == pytest.approx(float(jnp.linalg.norm(q)), rel=1e-5)
        return float(rotated_q @ rotated_k)

    assert score(7, 3) == pytest.approx(score(1004, 1000), abs=1e-3)
    assert score(7, 3) != pytest.approx(score(3, 7), abs=1e-3)


def test_rotation_leaves_the_dimensions_past_it_alone() -> None:
    x = normal(5, 2, 12)
    y = rotate(x, rotation(jnp.arange(5), RopeSpec((1.0, 0.5))))
    np.testing.assert_array_equal(y[..., 4:], x[..., 4:])
    np.testing.assert_array_equal(y[0], x[0])
    assert not np.array_equal(y[1, :, :4], x[1, :, :4])


def test_rotation_is_exact_to_float32_at_far_positions_whatever_the_dtype() -> None:
    # In bfloat16 position 1001 would round to 1000.
    one, other = (rotate(jnp.ones((1, 1, 2), "bfloat16"), rotation(jnp.array([p]), RopeSpec((1.0,)))) for p in (1000, 1001))
    assert not np.array_equal(one, other)


def test_embedding_scale_is_rounded_to_the_dtype() -> None:
    embedding = Embedding(4, 3072, "bfloat16", scale=3072**0.5, positions=None)
    embedding.weight[...] = jnp.ones((4, 3072), "bfloat16")
    assert float(embedding(jnp.array([2]), jnp.array([0]))[0, 0]) == 55.5


def test_embedding_adds_learned_positions() -> None:
    embedding = Embedding(4, 2, "float32", scale=None, positions=3)
    embedding.weight[...] = jnp.arange(8.0).reshape(4, 2)
    embedding.positions[...] = 100 * jnp.arange(6.0).reshape(3, 2)
    np.testing.assert_array_equal(embedding(jnp.array([3, 0]), jnp.array([1, 2])), [[206, 307], [400, 501]])


def test_logits_are_float32_without_the_padded_rows_and_bounded() -> None:
    hidden, weight = normal(2, 16, dtype="bfloat16"), 10 * normal(12, 16, dtype="bfloat16", seed=1)
    plain = project(hidden, weight, vocab_size=10, softcap=None)
    assert plain.dtype == jnp.float32
    assert plain.shape == (2, 10)
    np.testing.assert_allclose(project(hidden, weight, vocab_size=10, softcap=5.0), 5 * np.tanh(plain / 5), rtol=1e-5)


def test_gelu_comes_exact_and_approximate() -> None:
    x = jnp.linspace(-4, 4, 101)
    exact = np.asarray(jax.scipy.stats.norm.cdf(x) * x)
    np.testing.assert_allclose(ACTIVATIONS["gelu"](x), exact, atol=1e-6)
    difference = np.abs(np.asarray(ACTIVATIONS["gelu_tanh"](x)) - exact).max()
    assert 1e-5 < difference < 1e-3
