"""A matrix stored in few bits, the activations that are rounded as it is multiplied, and what both are worth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

_LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedWeight:
    """A matrix [O, I]: weight[o, i] = (values[o, i] - zeros[i // C, o]) * scales[i // C, o], with groups of C = I / G inputs.

    One group is a scale for each output channel. Square blocks are groups whose scales repeat over the outputs of a block
    (`of_blocks`). Groups come first, as outputs fill the lanes of a TPU and GPTQ and AWQ store them like that.

    Attributes:
        values: [O, I] int8, float8_e4m3fn or int4.
        scales, zeros: [G, O] float32; G divides I. zeros None: all zero.
    """

    values: jax.Array
    scales: jax.Array
    zeros: jax.Array | None = None

    @classmethod
    def of_blocks(cls, values: jax.Array, scales: jax.Array, block: int = 128) -> QuantizedWeight:
        """From scales [ceil(O / block), I / block], one for each square block."""
        return cls(values, jnp.repeat(scales, block, axis=0)[: values.shape[0]].T)

    @property
    def group(self) -> int:
        """C, inputs that share a scale."""
        return self.values.shape[1] // self.scales.shape[0]

    def dequantized(self, dtype: Any = jnp.float32) -> jax.Array:
        """[O, I], computed in float32."""
        grouped = self.values.astype(jnp.float32).reshape(self.values.shape[0], -1, self.group)
        if self.zeros is not None:
            grouped = grouped - self.zeros.T[:, :, None]
        return (grouped * self.scales.T[:, :, None]).reshape(self.values.shape).astype(dtype)


def quantize_rows(x: jax.Array, dtype: str) -> tuple[jax.Array, jax.Array]:
    """Round each row of x [..., N] to "int8" or "float8_e4m3fn": returns [..., N] and the scales [..., 1] float32 that give x back."""
    wide = x.astype(jnp.float32)
    scale = jnp.maximum(jnp.max(jnp.abs(wide), axis=-1, keepdims=True), 1e-30) / _LARGEST[dtype]
    wide = wide / scale
    return (jnp.round(wide) if dtype == "int8" else wide).astype(dtype), scale


def round_rows(x: jax.Array, dtype: str, group: int) -> jax.Array:
    """x [T, I] rounded by `quantize_rows`, group by group of the inputs, and back."""
    values, scales = quantize_rows(x.reshape(x.shape[0], -1, group), dtype)
    return (values.astype(jnp.float32) * scales).reshape(x.shape).astype(x.dtype)
