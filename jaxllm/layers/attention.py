"""Grouped-query attention around an `attend` callable that knows the KV cache."""

from __future__ import annotations

from typing import Any, Protocol

import jax
from flax import nnx
from jax.typing import DTypeLike

from jaxllm.layers.norm import Norm
from jaxllm.layers.param import param
from jaxllm.layers.rope import Rotation, rotate
from jaxllm.ops.linear import linear
from jaxllm.specs import AttendSpec, AttentionSpec


class Attend(Protocol):
    """Attention over everything that is kept of the rows of a step; query heads are grouped by KV head."""

    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array | None, cache: Any, spec: AttendSpec, sinks: jax.Array | None = None
    ) -> tuple[jax.Array, Any]:
        """q [T, H, D], k and v [T, K, D], sinks [H] to (out [T, H, D], cache)."""
        ...


class Attention(nnx.Module):
    """Fused projections, stored by KV head so that every shard holds whole groups: `qkv` [K, G + 2, D, M] (a group's query heads, then
    its key, then its value), `out` [M, K, G, D].
    """

    def __init__(self, spec: AttentionSpec, width: int, dtype: DTypeLike):
        kv_heads, dim = spec.num_kv_heads, spec.head_dim
        group = spec.num_heads // kv_heads
        self.spec = spec
        self.qkv = param((kv_heads, group + 2, dim, width), ("kv_heads", None, None, "embed"), dtype)
        self.qkv_bias = param((kv_heads, group + 2, dim), ("kv_heads", None, None), dtype) if spec.qkv_bias else None
        self.out = param((width, kv_heads, group, dim), ("embed", "kv_heads", None, None), dtype)
        self.out_bias = param((width,), ("embed",), dtype) if spec.out_bias else None
        self.sinks = param((kv_heads, group), ("kv_heads", None), dtype) if spec.sinks else None
        self.q_norm = Norm(spec.qk_norm, dim, dtype) if spec.qk_norm else None
        self.k_norm = Norm(spec.qk_norm, dim, dtype) if spec.qk_norm else None

    def __call__(self, x: jax.Array, rotation: Rotation | None, cache: Any, attend: Attend) -> tuple[jax.Array, Any]:
        """x [T, M] and the layer's cache to ([T, M], cache)."""
        spec = self.spec
        group = spec.num_heads // spec.num_kv_heads
        qkv = linear(x, self.qkv[...], None if self.qkv_bias is None else self.qkv_bias[...])
        q, k, v = qkv[:, :, :group], qkv[:, :, group], qkv[:, :, group + 1]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        sinks = None if self.sinks is None else self.sinks[...].reshape(-1)
        out, cache = attend(q.reshape(-1, spec.num_heads, spec.head_dim), k, v, cache, spec.attend, sinks)
        out = out.reshape(-1, spec.num_kv_heads, group, spec.head_dim)
        return linear(out, self.out[...], None if self.out_bias is None else self.out_bias[...]), cache
