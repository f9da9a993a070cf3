"""Root-mean-square norm and layer norm, computed in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from jaxllm.layers.param import Axis, param
from jaxllm.specs import NormSpec


class Norm(nnx.Module):
    """Normalises the last axis.

    The point of rounding is part of each model: `rms` rounds to x's dtype before it multiplies by the weight, the others after.
    """

    def __init__(self, spec: NormSpec, size: int, dtype: DTypeLike, axis: Axis | None = None):
        self.spec = spec
        self.weight = param((size,), (axis,), dtype)
        self.bias = param((size,), (axis,), dtype) if spec.kind == "layer" else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., size] to the same shape and dtype."""
        wide = x.astype(jnp.float32)
        if self.bias is not None:
            wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.spec.eps)
        if self.spec.kind == "rms":
            return wide.astype(x.dtype) * self.weight[...]
        if self.bias is not None:
            return (wide * self.weight[...].astype(jnp.float32) + self.bias[...].astype(jnp.float32)).astype(x.dtype)
        return (wide * (1.0 + self.weight[...].astype(jnp.float32))).astype(x.dtype)
