"""The Triton kernel for grouped products against XLA's: shared tiles, groups without rows, rows of nobody, sizes that fill no tile."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul.triton import ragged_dot


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("counts", "num_in", "num_out"),
    [
        ([3, 0, 11, 1, 0, 8], 72, 130),
        ([64, 0, 0], 64, 128),
        ([0, 0, 1], 16, 8),
        ([33, 33, 20, 5], 100, 64),
        ([15, 1, 16, 17, 0, 31, 48], 64, 256),
        ([0, 0], 64, 128),
    ],
)
def test_products_equal_those_of_xla(counts: list[int], num_in: int, num_out: int, dtype: jax.typing.DTypeLike) -> None:
    rng = np.random.default_rng(1)
    used = sum(counts)
    x = jnp.asarray(rng.normal(size=(used + 9, num_in)), dtype)
    matrices = jnp.asarray(rng.normal(size=(len(counts), num_in, num_out)), dtype)
    got = ragged_dot(x, matrices, jnp.asarray(counts), interpret=True)
    want = jax.lax.ragged_dot(x, matrices, jnp.asarray(counts), preferred_element_type=jnp.float32)
    assert got.dtype == dtype
    assert got.shape == want.shape
    tolerance = 2e-5 if dtype == jnp.float32 else 1e-2
    np.testing.assert_allclose(got[:used].astype(jnp.float32), want[:used], rtol=tolerance, atol=tolerance * num_in**0.5)
