"""The Mamba 2 layer: one projection, a short convolution, state space duality, a gated norm."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxllm.layers.mlp import ACTIVATIONS
from jaxllm.layers.norm import Norm
from jaxllm.layers.param import Axes, param
from jaxllm.ops.linear import linear
from jaxllm.ops.recurrent import StateRows, causal_conv, state_space_dual
from jaxllm.specs import Mamba2Spec


class Mamba2(nnx.Module):
    """Everything is stored by group, so that every shard holds whole ones, for G groups of H heads of P dims with states of S.

    `projection` [G, H P + (H P + 2 S) + H, M]: gate; values, inputs and outputs of the state, which pass the convolution `conv`
    [G, H P + 2 S, W]; step sizes. `out` [M, G H P].
    """

    def __init__(self, spec: Mamba2Spec, width: int, dtype: DTypeLike):
        groups, dim, heads = spec.num_groups, spec.group_dim, spec.num_heads // spec.num_groups
        conv = dim + 2 * spec.state_size
        by_group: Axes = ("kv_heads", None)
        self.spec = spec
        self.projection = param((groups, dim + conv + heads, width), ("kv_heads", None, "embed"), dtype)
        self.projection_bias = param((groups, dim + conv + heads), by_group, dtype) if spec.bias else None
        self.conv = param((groups, conv, spec.conv_width), ("kv_heads", None, None), dtype)
        self.conv_bias = param((groups, conv), by_group, dtype) if spec.conv_bias else None
        self.a_log, self.d, self.dt_bias = (param((groups, heads), by_group, jnp.float32) for _ in range(3))
        self.norm = Norm(spec.norm, (groups, dim), dtype, "kv_heads", over=1 if spec.norm_each else 2) if spec.norm else None
        self.out = param((width, groups * dim), ("embed", "kv_heads"), dtype)
        self.out_bias = param((width,), ("embed",), dtype) if spec.bias else None

    def __call__(self, x: jax.Array, cache: Any, rows: StateRows) -> tuple[jax.Array, Any]:
        """x [T, M] and the layer's cache to ([T, M], cache)."""
        spec, dim = self.spec, self.spec.group_dim
        projected = linear(x, self.projection[...], None if self.projection_bias is None else self.projection_bias[...])
        if spec.scales is not None:
            sizes = [size for size, _ in spec.rows["projection"]]
            projected = projected * jnp.repeat(jnp.array(spec.scales, x.dtype), jnp.array(sizes), total_repeat_length=sum(sizes))
        gate, mixed, dt = jnp.split(projected, (dim, projected.shape[-1] - self.dt_bias.shape[1]), axis=-1)
        mixed, conv = causal_conv(mixed, self.conv[...], None if self.conv_bias is None else self.conv_bias[...], cache[0], rows)
        values, b, c = jnp.split(ACTIVATIONS[spec.activation](mixed), (dim, dim + spec.state_size), axis=-1)
        values = values.reshape(*dt.shape, spec.head_dim)
        dt = jnp.clip(jax.nn.softplus(dt.astype(jnp.float32) + self.dt_bias[...]), *spec.dt_limits)
        y, states = state_space_dual(values, dt, -jnp.exp(self.a_log[...]), b, c, cache[1], rows)
        y = (y + self.d[..., None] * values).reshape(gate.shape)

        gate = jax.nn.silu(gate.astype(jnp.float32))
        if self.norm is not None:
            y = self.norm(y) * gate if spec.norm_first else self.norm(y * gate)
        else:
            y = y * gate
        y = linear(y.astype(x.dtype).reshape(len(x), -1), self.out[...], None if self.out_bias is None else self.out_bias[...])
        return y if spec.out_scale == 1.0 else y * jnp.asarray(spec.out_scale, y.dtype), (conv, states)
