"""Which attention runs on which platform, and how it is split over a mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxllm.ops.attention import tpu, xla
from jaxllm.ops.attention.metadata import AttentionMetadata, Cache
from jaxllm.specs import AttendSpec
from pallas_kernels.ragged_paged_attention.tuning import find_device

AttendFn = Callable[[jax.Array, jax.Array, jax.Array, Any, AttentionMetadata, AttendSpec], tuple[jax.Array, Any]]
CacheShapesFn = Callable[[int, int, int, int, jnp.dtype], Any]


@dataclass(frozen=True)
class AttentionBackend:
    """One implementation of the attention contract, run on each shard of the heads.

    cache_shapes: (num_pages, page_size, num_kv_heads, head_dim, dtype) -> abstract arrays of one layer's pages, in the backend's layout.
    """

    name: str
    attend_shard: AttendFn
    cache_shapes: CacheShapesFn

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: Cache,
        metadata: AttentionMetadata,
        spec: AttendSpec,
        *,
        mesh: Mesh,
        heads_axis: str,
    ) -> tuple[jax.Array, Cache]:
        """q [T, H, D], k and v [T, K, D] with their heads split over `heads_axis`; returns ([T, H, D], cache).

        The output of a token whose k or v is not finite is NaN: pages hold zeros in their place, and nobody else would notice.
        """

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, cache: Cache, metadata: AttentionMetadata) -> tuple[jax.Array, Cache]:
            out, cache = self.attend_shard(q, k, v, cache, metadata, spec)
            # Zero, or NaN where k or v is not finite; cheaper than a reduction in each layer.
            poison = k * 0 + v * 0
            num_tokens, num_kv, head_dim = k.shape
            grouped = out.reshape(num_tokens, num_kv, -1, head_dim) + poison[:, :, None].astype(out.dtype)
            return grouped.reshape(out.shape), cache

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


def choose_backend(platform: str, device_kind: str = "") -> AttentionBackend:
    """The backend for a jax platform and a kind of its devices. XLA serves every platform that has no kernel."""
    if platform == "tpu":
        return AttentionBackend("tpu", tpu.Attend(find_device(device_kind)), tpu.cache_shapes)
    return AttentionBackend("xla", xla.attend, xla.cache_shapes)
