"""Products of activations with stored weights, as each platform wants them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.ops.linear import linear


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_a_program_for_another_platform_has_none_of_the_cpu_s_detours(platform):
    x, weight = jax.ShapeDtypeStruct((8, 32), jnp.bfloat16), jax.ShapeDtypeStruct((2, 3, 32), jnp.bfloat16)
    traced = jax.jit(linear).trace(x, weight)
    assert "optimization_barrier" in traced.lower(lowering_platforms=("cpu",)).as_text()
    assert "optimization_barrier" not in traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("num_rows", [1, 2, 65])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_order_of_operands_changes_nothing(num_rows, dtype):
    rng = np.random.default_rng(num_rows)
    x, weight = (jnp.asarray(rng.integers(-3, 4, size), dtype) for size in ((num_rows, 16), (3, 4, 16)))
    got = jax.jit(linear)(x, weight)
    assert got.dtype == dtype
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.einsum("ta,xya->txy", *(np.asarray(a, np.float32) for a in (x, weight))))
