"""From the hidden states of segments to one vector each, and the dense layers behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxllm.layers.mlp import ACTIVATIONS
from jaxllm.layers.norm import Norm
from jaxllm.layers.param import param
from jaxllm.ops.attention.segments import Segments
from jaxllm.ops.linear import linear
from jaxllm.specs import DenseSpec, PoolingKind

_ACTIVATIONS: dict[Any, Callable[[jax.Array], jax.Array]] = {**ACTIVATIONS, "tanh": jnp.tanh, "sigmoid": jax.nn.sigmoid, None: lambda x: x}


class Dense(nnx.Module):
    """norm(activation(x W + b)): `weight` [out, in]. Small enough that every device holds all of it."""

    def __init__(self, spec: DenseSpec, width: int, dtype: DTypeLike):
        self.spec = spec
        self.weight = param((spec.width, width), (None, None), dtype)
        self.bias = param((spec.width,), (None,), dtype) if spec.bias else None
        self.norm = Norm(spec.norm, spec.width, dtype) if spec.norm else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [N, in] to [N, out]."""
        y = _ACTIVATIONS[self.spec.activation](linear(x, self.weight[...], None if self.bias is None else self.bias[...]))
        return y if self.norm is None else self.norm(y)


def pool(hidden: jax.Array, starts: jax.Array, segments: Segments, kinds: tuple[PoolingKind, ...]) -> jax.Array:
    """hidden [T, M] and starts [R + 1] of the segments to [R, M * kinds] in hidden's dtype; segments without tokens give what they like."""
    num_rows = starts.shape[0] - 1
    lengths = jnp.maximum(starts[1:] - starts[:-1], 1)
    wide = hidden.astype(jnp.float32)

    def summed(weights: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(wide * weights[:, None], segments.rows, num_rows + 1)[:num_rows]

    def one(kind: PoolingKind) -> jax.Array:
        if kind == "cls":
            return hidden[jnp.minimum(starts[:-1], hidden.shape[0] - 1)]
        if kind == "last":
            return hidden[jnp.maximum(starts[1:] - 1, 0)]
        if kind == "max":
            return jax.ops.segment_max(wide, segments.rows, num_rows + 1)[:num_rows]
        if kind == "weighted_mean":
            weights = (jnp.arange(hidden.shape[0]) - segments.firsts + 1).astype(jnp.float32)
            return summed(weights) / (lengths * (lengths + 1) / 2)[:, None]
        total = summed(jnp.ones(hidden.shape[0]))
        return total / (lengths if kind == "mean" else jnp.sqrt(lengths.astype(jnp.float32)))[:, None]

    return jnp.concatenate([one(kind).astype(hidden.dtype) for kind in kinds], axis=-1)
