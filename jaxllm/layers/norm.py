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
    """Normalises the last `over` axes. The weight has the shape `size`, whose first axis is `axis`; it may have more axes than are
    normalised.
    """

    def __init__(self, spec: NormSpec, size: int | tuple[int, ...], dtype: DTypeLike, axis: Axis | None = None, *, over: int = 1):
        shape = (size,) if isinstance(size, int) else size
        axes = (axis, *(None for _ in shape[1:]))
        self.spec = spec
        self.over = tuple(range(-over, 0))
        self.weight = param(shape, axes, dtype) if spec.weight else None
        self.bias = param(shape, axes, dtype) if spec.kind.startswith("layer") and spec.bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., *size] to the same shape and dtype."""
        wide = x.astype(jnp.float32)
        if self.spec.kind.startswith("layer"):
            wide = wide - jnp.mean(wide, axis=self.over, keepdims=True)
        wide = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=self.over, keepdims=True) + self.spec.eps)
        # The point of rounding is part of each model.
        if self.spec.kind == "rms" and self.weight is not None:
            return wide.astype(x.dtype) * self.weight[...]
        if self.weight is not None:
            weight = self.weight[...].astype(jnp.float32)
            wide = wide * (1.0 + weight if self.spec.kind.endswith("plus_one") else weight)
        if self.bias is not None:
            wide = wide + self.bias[...].astype(jnp.float32)
        return wide.astype(x.dtype)
