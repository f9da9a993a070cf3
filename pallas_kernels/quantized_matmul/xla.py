"""Products with quantized weights in plain XLA.

One scale for each output: compilers for TPUs and GPUs convert the weight inside of the product, and multiply in int8 or fp8 where the
activations are rounded. Groups of inputs are widened first, which costs a copy of the weight in x's dtype: what our kernels are for.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.quantized_matmul.weight import QuantizedWeight, quantize_rows, round_rows


def matmul(x: jax.Array, weight: QuantizedWeight, *, activations: str | None = None) -> jax.Array:
    """As `reference.matmul`, of numbers rounded to x's dtype."""
    if weight.group < weight.values.shape[1] or weight.zeros is not None:
        if activations is not None:
            x = round_rows(x, activations, weight.group)
        return _product(x, weight.dequantized(x.dtype), x.dtype)
    if activations is None:
        return (_product(x, weight.values.astype(x.dtype), jnp.float32) * weight.scales).astype(x.dtype)
    rounded, row_scales = quantize_rows(x, activations)
    whole = rounded.dtype == weight.values.dtype == jnp.int8
    product = _product(rounded, weight.values.astype(rounded.dtype), jnp.int32 if whole else jnp.float32)
    return (product.astype(jnp.float32) * row_scales * weight.scales).astype(x.dtype)


def _product(x: jax.Array, weight: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    return lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=dtype)
