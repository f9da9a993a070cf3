"""The Mamba layer: a short convolution and a selective scan, gated."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxllm.layers.mlp import ACTIVATIONS
from jaxllm.layers.norm import Norm
from jaxllm.layers.param import param
from jaxllm.ops.linear import linear
from jaxllm.ops.recurrent import StateRows, causal_conv, selective_scan
from jaxllm.specs import MambaSpec


class Mamba(nnx.Module):
    """`projection` [I, 2, M] to values and gate of I channels, `conv` [I, W]; `inner` [R + 2 S, I] from the values to step sizes of rank R,
    of which `steps` [I, R] makes those of the channels, and to inputs and outputs of states of S; `out` [M, I].
    """

    def __init__(self, spec: MambaSpec, width: int, dtype: DTypeLike):
        channels, size = spec.inner, spec.state_size
        self.spec = spec
        self.projection = param((channels, 2, width), ("mlp", None, "embed"), dtype)
        self.projection_bias = param((channels, 2), ("mlp", None), dtype) if spec.bias else None
        self.conv = param((channels, spec.conv_width), ("mlp", None), dtype)
        self.conv_bias = param((channels,), ("mlp",), dtype) if spec.conv_bias else None
        self.inner = param((spec.rank + 2 * size, channels), (None, "mlp"), dtype)
        self.steps = param((channels, spec.rank), ("mlp", None), dtype)
        self.steps_bias = param((channels,), ("mlp",), jnp.float32)
        self.a_log, self.d = param((channels, size), ("mlp", None), jnp.float32), param((channels,), ("mlp",), jnp.float32)
        inner_norm = spec.inner_norm
        self.dt_norm = Norm(inner_norm, spec.rank, dtype) if inner_norm else None
        self.b_norm = Norm(inner_norm, size, dtype) if inner_norm else None
        self.c_norm = Norm(inner_norm, size, dtype) if inner_norm else None
        self.out = param((width, channels), ("embed", "mlp"), dtype)
        self.out_bias = param((width,), ("embed",), dtype) if spec.bias else None

    def __call__(self, x: jax.Array, cache: Any, rows: StateRows) -> tuple[jax.Array, Any]:
        """x [T, M] and the layer's cache to ([T, M], cache)."""
        spec = self.spec
        projected = linear(x, self.projection[...], None if self.projection_bias is None else self.projection_bias[...])
        conv_bias = None if self.conv_bias is None else self.conv_bias[...]
        values, conv = causal_conv(projected[..., 0], self.conv[...], conv_bias, cache[0], rows)
        values = ACTIVATIONS[spec.activation](values)
        inner = jnp.split(linear(values.astype(x.dtype), self.inner[...]), (spec.rank, spec.rank + spec.state_size), axis=-1)
        dt, b, c = (
            part if norm is None else norm(part) for part, norm in zip(inner, (self.dt_norm, self.b_norm, self.c_norm), strict=True)
        )
        dt = jax.nn.softplus(linear(dt, self.steps[...]).astype(jnp.float32) + self.steps_bias[...])
        b, c = b.astype(jnp.float32), c.astype(jnp.float32)
        y, states = selective_scan(values, dt, -jnp.exp(self.a_log[...]), b, c, cache[1], rows)
        y = (y + self.d[...] * values) * ACTIVATIONS[spec.activation](projected[..., 1].astype(jnp.float32))
        return linear(y.astype(x.dtype), self.out[...], None if self.out_bias is None else self.out_bias[...]), (conv, states)
