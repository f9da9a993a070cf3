"""Random weights of a model's shape."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.models.build import define_model
from jaxllm.weights.dummy import dummy_params
from tests.checkpoints import tiny_config
from tests.dense import run_dense


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma3ForCausalLM", "GPT2LMHeadModel"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_finite_and_differ_between_tokens(architecture: str, dtype: str) -> None:
    model = define_model(tiny_config(architecture), dtype=dtype)
    params = dummy_params(model, lambda name, array: jnp.asarray(array))
    logits = np.asarray(run_dense(model, params, [1, 2, 3, 4, 5, 6, 7, 8]))
    assert np.isfinite(logits).all()
    assert logits.std(axis=-1).min() > 0.05
    assert np.abs(logits).max() < 100


def test_seed_decides_the_weights() -> None:
    model = define_model(tiny_config(), dtype="float32")
    first, again, other = (dummy_params(model, lambda name, array: array, seed=seed) for seed in (1, 1, 2))
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)
    index = model.names.index("layers.0.mlp.down")
    assert not np.array_equal(first[index], other[index])
