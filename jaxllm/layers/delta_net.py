"""The gated delta net: a short convolution over queries, keys and values, the gated delta rule, a gated norm."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from jaxllm.layers.mlp import ACTIVATIONS
from jaxllm.layers.norm import Norm
from jaxllm.layers.param import param
from jaxllm.ops.linear import linear
from jaxllm.ops.recurrent import StateRows, causal_conv, gated_delta_rule
from jaxllm.specs import DeltaNetSpec


class DeltaNet(nnx.Module):
    """Stored by group of one query and key head and its H value heads, for G groups, key dim D and value dim E.

    `projection` [G, 2 D + 2 H E, M]: query, key and values, which pass the convolution `conv` [G, 2 D + H E, W]; gate. `rates`
    [G, 2, H, M]: how much is learned, and how fast is forgotten. `out` [M, G H E].
    """

    def __init__(self, spec: DeltaNetSpec, width: int, dtype: DTypeLike):
        groups, dim, heads = spec.num_groups, spec.group_dim, spec.num_heads // spec.num_groups
        conv = 2 * spec.key_dim + dim
        self.spec = spec
        self.projection = param((groups, conv + dim, width), ("kv_heads", None, "embed"), dtype)
        self.rates = param((groups, 2, heads, width), ("kv_heads", None, None, "embed"), dtype)
        self.conv = param((groups, conv, spec.conv_width), ("kv_heads", None, None), dtype)
        self.a_log, self.dt_bias = (param((groups, heads), ("kv_heads", None), jnp.float32) for _ in range(2))
        self.norm = Norm(spec.norm, spec.value_dim, dtype)
        self.out = param((width, groups * dim), ("embed", "kv_heads"), dtype)

    def __call__(self, x: jax.Array, cache: Any, rows: StateRows) -> tuple[jax.Array, Any]:
        """x [T, M] and the layer's cache to ([T, M], cache)."""
        spec = self.spec
        mixed, gate = jnp.split(linear(x, self.projection[...]), (self.conv.shape[1],), axis=-1)
        rates = linear(x, self.rates[...]).astype(jnp.float32)
        mixed, conv = causal_conv(mixed, self.conv[...], None, cache[0], rows)
        q, k, v = jnp.split(ACTIVATIONS[spec.activation](mixed), (spec.key_dim, 2 * spec.key_dim), axis=-1)
        q, k = (part * lax.rsqrt(jnp.sum(jnp.square(part), axis=-1, keepdims=True) + 1e-6) for part in (q, k))
        v = v.reshape(*rates.shape[:2], -1, spec.value_dim)
        decay = -jnp.exp(self.a_log[...]) * jax.nn.softplus(rates[:, :, 1] + self.dt_bias[...])
        y, states = gated_delta_rule(q * spec.key_dim**-0.5, k, v, decay, jax.nn.sigmoid(rates[:, :, 0]), cache[1], rows)
        y = self.norm(y) * jax.nn.silu(gate.astype(jnp.float32).reshape(y.shape))
        return linear(y.astype(x.dtype).reshape(len(x), -1), self.out[...]), (conv, states)
