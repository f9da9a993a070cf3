"""Grouped-query attention around an `attend` callable that knows the KV cache."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
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
        self,
        q: jax.Array,
        k: jax.Array | None,
        v: jax.Array | None,
        cache: Any,
        spec: AttendSpec,
        sinks: jax.Array | None = None,
        bias: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """q [T, H, D], k and v [T, K, D], sinks [H] to (out [T, H, D], cache). Without k the cache already holds those of this step.
        bias [H, N]: see `RelativeBias`.
        """
        ...


class Where(NamedTuple):
    """What the positions of a step's tokens mean to a layer: the rotation of its heads, the factors [T] of its queries, the bias [H, N] of
    its scores.
    """

    rotation: Rotation | None = None
    temperature: jax.Array | None = None
    bias: jax.Array | None = None


class Attention(nnx.Module):
    """Fused projections, stored by KV head so that every shard holds whole groups: `qkv` [K, G + 2, D, M] (a group's query heads, then
    its key, then its value), `out` [M, H D]. Where values are keys, it is `qk` [K, G + 1, D, M]; where both are another layer's,
    `q` [K, G, D, M]; where they are an encoder's, `q` and `kv` [K, 2, D, M]. `gate` [K, G, D, M], where there is one, is of the output.
    """

    def __init__(self, spec: AttentionSpec, width: int, dtype: DTypeLike):
        kv_heads, dim = spec.num_kv_heads, spec.head_dim
        group = spec.num_heads // kv_heads
        self.spec = spec
        self.parts = "q" if spec.cache_of is not None or spec.cross else "qk" if spec.key_is_value else "qkv"
        heads = (kv_heads, group + len(self.parts) - 1, dim)
        setattr(self, self.parts, param((*heads, width), ("kv_heads", None, None, "embed"), dtype))
        setattr(self, f"{self.parts}_bias", param(heads, ("kv_heads", None, None), dtype) if spec.qkv_bias else None)
        self.kv = param((kv_heads, 2, dim, width), ("kv_heads", None, None, "embed"), dtype) if spec.cross else None
        self.kv_bias = param((kv_heads, 2, dim), ("kv_heads", None, None), dtype) if spec.cross and spec.qkv_bias else None
        self.out = param((width, spec.num_heads * dim), ("embed", "kv_heads"), dtype)
        self.out_bias = param((width,), ("embed",), dtype) if spec.out_bias else None
        self.gate = param((kv_heads, group, dim, width), ("kv_heads", None, None, "embed"), dtype) if spec.gated else None
        self.sinks = param((kv_heads, group), ("kv_heads", None), dtype) if spec.sinks else None
        self.q_norm = self._norm((kv_heads, group, dim), dtype)
        self.k_norm = self._norm((kv_heads, dim), dtype) if spec.cache_of is None else None
        self.v_norm = Norm(spec.v_norm, dim, dtype) if spec.v_norm else None

    def _norm(self, heads: tuple[int, ...], dtype: DTypeLike) -> Norm | None:
        spec = self.spec
        if spec.qk_norm is None:
            return None
        if spec.qk_norm_over == "head":
            return Norm(spec.qk_norm, spec.head_dim, dtype)
        return Norm(spec.qk_norm, heads, dtype, "kv_heads", over=1 if spec.qk_norm_over == "each" else len(heads))

    def __call__(self, x: jax.Array, where: Where, cache: Any, attend: Attend) -> tuple[jax.Array, Any]:
        """x [T, M] and the layer's cache to ([T, M], cache)."""
        spec = self.spec
        group = spec.num_heads // spec.num_kv_heads
        bias = getattr(self, f"{self.parts}_bias")
        heads = linear(x, getattr(self, self.parts)[...], None if bias is None else bias[...])
        q = self._place(heads[:, :, :group], self.q_norm, where.rotation)
        if where.temperature is not None:
            q = q * where.temperature[:, None, None, None].astype(q.dtype)
        k = v = None
        if self.parts != "q":
            k, v = self._place(heads[:, :, group], self.k_norm, where.rotation), self._clip(heads[:, :, -1])
            v = v if self.v_norm is None else self.v_norm(v)
        sinks = None if self.sinks is None else self.sinks[...].reshape(-1)
        bias_of_scores = where.bias if spec.attend.relative else None
        out, cache = attend(q.reshape(-1, spec.num_heads, spec.head_dim), k, v, cache, spec.attend, sinks, bias_of_scores)
        out = out.reshape(-1, spec.num_heads * spec.head_dim)
        if self.gate is not None:
            out = out * jax.nn.sigmoid(linear(x, self.gate[...])).reshape(out.shape)
        out = linear(out, self.out[...], None if self.out_bias is None else self.out_bias[...])
        return out if spec.out_scale == 1.0 else out * jnp.asarray(spec.out_scale, out.dtype), cache

    def keys_and_values(self, encoded: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What attention to an encoder reads of its output [T, M]: keys and values [T, K, D]."""
        assert self.kv is not None
        heads = linear(encoded, self.kv[...], None if self.kv_bias is None else self.kv_bias[...])
        return heads[:, :, 0], heads[:, :, 1]

    def _clip(self, heads: jax.Array) -> jax.Array:
        return heads if self.spec.clip is None else jnp.clip(heads, -self.spec.clip, self.spec.clip)

    def _place(self, heads: jax.Array, norm: Norm | None, rotation: Rotation | None) -> jax.Array:
        """Normalise, clip and rotate [T, K, ..., D]."""
        if norm is not None and not self.spec.qk_norm_after_rope:
            heads = norm(heads)
        heads = self._clip(heads)
        if rotation is not None and self.spec.rope is not None:
            heads = rotate(heads, rotation, interleaved=self.spec.rope.interleaved)
        return norm(heads) if norm is not None and self.spec.qk_norm_after_rope else heads
