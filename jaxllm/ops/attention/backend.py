"""Which attention runs on which platform, and how it is split over a mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxllm.ops.attention import xla
from jaxllm.ops.attention.metadata import AttentionMetadata, LayerCache
from jaxllm.specs import AttendSpec

AttendFn = Callable[[jax.Array, jax.Array, jax.Array, LayerCache, AttentionMetadata, AttendSpec], tuple[jax.Array, LayerCache]]


@dataclass(frozen=True)
class AttentionBackend:
    """One implementation of the attention contract, run on each shard of the heads."""

    name: str
    attend_shard: AttendFn

    def cache_shapes(self, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: jnp.dtype) -> LayerCache:
        """Abstract arrays of one layer's pages."""
        k: Any = jax.ShapeDtypeStruct((num_pages, num_kv_heads, head_dim, page_size), dtype)
        v: Any = jax.ShapeDtypeStruct((num_pages, num_kv_heads, page_size, head_dim), dtype)
        return LayerCache(k, v)

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: LayerCache,
        metadata: AttentionMetadata,
        spec: AttendSpec,
        *,
        mesh: Mesh,
        heads_axis: str,
    ) -> tuple[jax.Array, LayerCache]:
        """q [T, H, D], k and v [T, K, D] with their heads split over `heads_axis`; returns ([T, H, D], cache).

        The output of a token whose k or v is not finite is NaN: pages hold zeros in their place, and nobody else would notice.
        """

        def attend(
            q: jax.Array, k: jax.Array, v: jax.Array, cache: LayerCache, metadata: AttentionMetadata
        ) -> tuple[jax.Array, LayerCache]:
            out, cache = self.attend_shard(q, k, v, cache, metadata, spec)
            finite = jnp.all(jnp.isfinite(k) & jnp.isfinite(v), axis=(1, 2))
            return jnp.where(finite[:, None, None], out, jnp.nan), cache

        if mesh.size == 1:
            return attend(q, k, v, cache, metadata)
        heads = PartitionSpec(None, heads_axis)
        sharded = jax.shard_map(
            attend,
            mesh=mesh,
            in_specs=(heads, heads, heads, heads, PartitionSpec()),
            out_specs=(heads, heads),
            check_vma=False,
        )
        return sharded(q, k, v, cache, metadata)


def choose_backend(platform: str) -> AttentionBackend:
    """The backend for a jax platform. Until kernels for an accelerator exist, XLA serves every platform."""
    del platform
    return AttentionBackend("xla", xla.attend)
