"""The oracle: everything in float32, in the order of the definition."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.quantized_matmul.weight import QuantizedWeight, round_rows


def matmul(x: jax.Array, weight: QuantizedWeight, *, activations: str | None = None) -> jax.Array:
    """x [T, I] times weight [O, I]: [T, O] in x's dtype.

    Args:
        activations: "int8" or "float8_e4m3fn" to round each row of x first, group by group of the weight.
    """
    wide = x.astype(jnp.float32)
    if activations is not None:
        wide = round_rows(wide, activations, weight.group)
    return jnp.dot(wide, weight.dequantized().T, precision="highest").astype(x.dtype)
