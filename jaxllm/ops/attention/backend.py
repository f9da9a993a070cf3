"""Which attention runs on which platform, and how it is split over a mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxllm.ops.attention import gpu, tpu, xla
from jaxllm.ops.attention.metadata import AttentionMetadata, Cache, LayerCache, write_pages
from jaxllm.ops.mosaic_gpu import reason_against
from jaxllm.specs import AttendSpec, CacheLayer
from pallas_kernels.devices import find_device, is_blackwell

# (q, k, v, cache, metadata, spec, sinks, bias) -> (out, cache)
AttendFn = Callable[
    [jax.Array, jax.Array | None, jax.Array | None, Any, AttentionMetadata, AttendSpec, jax.Array | None, jax.Array | None],
    tuple[jax.Array, Any],
]
CacheShapesFn = Callable[[int, int, CacheLayer, jnp.dtype], Any]


@dataclass(frozen=True)
class AttentionBackend:
    """One implementation of the attention contract, run on each shard of the heads.

    cache_shapes: (num_pages, page_size, layer, dtype) -> abstract arrays of one layer's pages, in the backend's layout.
    """

    name: str
    attend_shard: AttendFn
    cache_shapes: CacheShapesFn

    def attend(
        self,
        q: jax.Array,
        k: jax.Array | None,
        v: jax.Array | None,
        cache: Cache,
        metadata: AttentionMetadata,
        spec: AttendSpec,
        sinks: jax.Array | None = None,
        bias: jax.Array | None = None,
        *,
        mesh: Mesh,
        heads_axis: str,
    ) -> tuple[jax.Array, Cache]:
        """q [T, H, D], k and v [T, K, D], sinks [H], bias [H, N] with their heads split over `heads_axis`; returns ([T, H, D], cache).
        Without k and v the cache already holds those of this step.

        A latent (v None, K = 1) is whole on every device, as are its pages; the output is then [T, H, spec.latent]. The output of a token
        whose k or v is not finite is NaN: pages hold zeros in their place, and nobody else would notice.
        """

        bias = bias if spec.alibi is None else jnp.asarray(spec.alibi, jnp.float32)

        def attend(
            q: jax.Array,
            k: jax.Array | None,
            v: jax.Array | None,
            cache: Cache,
            metadata: AttentionMetadata,
            sinks: jax.Array | None,
            bias: jax.Array | None,
        ) -> tuple[jax.Array, Cache]:
            out, cache = self.attend_shard(q, k, v, cache, metadata, spec, sinks, bias)
            if k is None:
                return out, cache
            # Zero, or NaN where k or v is not finite; cheaper than a reduction in each layer.
            poison = k[..., : spec.latent] * 0 + jnp.sum(k[..., spec.latent :] * 0, -1, keepdims=True) if v is None else k * 0 + v * 0
            grouped = out.reshape(*k.shape[:2], -1, out.shape[-1]) + poison[:, :, None].astype(out.dtype)
            return grouped.reshape(out.shape), cache

        if mesh.size == 1:
            return attend(q, k, v, cache, metadata, sinks, bias)
        heads, everywhere = PartitionSpec(None, heads_axis), PartitionSpec()
        kept = heads if spec.latent is None else everywhere
        sharded = jax.shard_map(
            attend,
            mesh=mesh,
            in_specs=(heads, kept, kept, kept, everywhere, PartitionSpec(heads_axis), PartitionSpec(heads_axis)),
            out_specs=(heads, kept),
            check_vma=False,
        )
        return sharded(q, k, v, cache, metadata, sinks, bias)

    def store(
        self, k: jax.Array, v: jax.Array, cache: LayerCache, metadata: AttentionMetadata, *, mesh: Mesh, heads_axis: str
    ) -> LayerCache:
        """Write k and v [T, K, D] of an encoder's input into their pages, which are those of `xla` whatever the backend."""
        if mesh.size == 1:
            return write_pages(cache, k, v, metadata)
        heads = PartitionSpec(None, heads_axis)
        specs = (heads, heads, heads, PartitionSpec())
        return jax.shard_map(write_pages, mesh=mesh, in_specs=specs, out_specs=heads, check_vma=False)(cache, k, v, metadata)


def choose_backend(platform: str, device_kind: str = "") -> AttentionBackend:
    """The backend for a jax platform and a kind of its devices. XLA serves every platform that has no kernel."""
    if platform == "tpu":
        return AttentionBackend("tpu", tpu.Attend(find_device(device_kind)), tpu.cache_shapes)
    if platform in ("gpu", "cuda"):
        reason = reason_against(device_kind)
        if reason is None:
            return AttentionBackend("gpu", gpu.Attend(blackwell=is_blackwell(device_kind)), xla.cache_shapes)
        gpu.say_once(reason)
    return AttentionBackend("xla", xla.attend, xla.cache_shapes)
