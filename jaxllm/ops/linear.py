"""Matrix products of activations with weights stored [out, in], as checkpoints have them."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

# On CPU, up to this many rows the weight as the left operand is up to 1.5 times faster; beyond, it is slower.
_LEFT_OPERAND_MAX_ROWS = 64


def linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """x [T, in] times weight [*out, in], plus bias [*out]: returns [T, *out] in x's dtype (accumulated in float32)."""
    y = contract(x, weight, preferred_element_type=x.dtype)
    return y if bias is None else y + bias.astype(y.dtype)


def contract(x: jax.Array, weight: jax.Array, preferred_element_type: DTypeLike) -> jax.Array:
    """The product of `linear` with an explicit result dtype."""

    def on_cpu(x: jax.Array, weight: jax.Array) -> jax.Array:
        # Products whose results are rounded by themselves take XLA on CPU two to four times as long.
        return _contract_on_cpu(x, weight, jnp.float32).astype(preferred_element_type)

    elsewhere = partial(_contract, out_dtype=preferred_element_type)
    # Chosen when a program is lowered, not by where this process runs: programs are also compiled for devices that are not here.
    return lax.platform_dependent(x, weight, cpu=on_cpu, default=elsewhere)


def _contract(x: jax.Array, weight: jax.Array, out_dtype: DTypeLike) -> jax.Array:
    return lax.dot_general(x, weight, (((1,), (weight.ndim - 1,)), ((), ())), preferred_element_type=out_dtype)


def _contract_on_cpu(x: jax.Array, weight: jax.Array, out_dtype: DTypeLike) -> jax.Array:
    if x.dtype != jnp.float32 and x.shape[0] == 1:
        # XLA on CPU turns a one-row bfloat16 product into a full float32 copy of the weight (30 times slower): give it two rows.
        return _contract_on_cpu(jnp.concatenate([x, x]), weight, out_dtype)[:1]
    if x.shape[0] <= _LEFT_OPERAND_MAX_ROWS:
        return _weight_on_the_left(x, weight, out_dtype)
    # As matrices: with more axes XLA on CPU transposes a copy of the weight in every call.
    return _contract(x, weight.reshape(-1, weight.shape[-1]), out_dtype).reshape(x.shape[0], *weight.shape[:-1])


def _weight_on_the_left(x: jax.Array, weight: jax.Array, out_dtype: DTypeLike) -> jax.Array:
    y = lax.dot_general(weight, x, (((weight.ndim - 1,), (1,)), ((), ())), preferred_element_type=out_dtype)
    # Without the barrier XLA folds the transpose back into the product, in the slow order.
    return jnp.moveaxis(lax.optimization_barrier(y), -1, 0)
