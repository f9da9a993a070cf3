"""Paged attention on TPUs: the Mosaic kernel of `pallas_kernels`, behind the contract of this package.

Its pages are one array a layer, [N, W, S, L] words (`pallas_kernels/ragged_paged_attention/layout.py`), which splits over devices along W.
Layers whose attention the kernel does not know (chunks, biases of scores, an encoder's input) keep XLA's pages and run on XLA.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.errors import ConfigError
from jaxllm.ops.attention import xla
from jaxllm.ops.attention.metadata import AttentionMetadata, Cache, LayerCache
from jaxllm.specs import AttendSpec, CacheLayer
from pallas_kernels.devices import Device
from pallas_kernels.ragged_paged_attention import layout, tpu

logger = logging.getLogger(__name__)


def cache_shapes(num_pages: int, page_size: int, layer: CacheLayer, dtype: jnp.dtype) -> jax.ShapeDtypeStruct | LayerCache:
    """The abstract pages of one layer.

    Raises:
        ConfigError: a dtype or a block_size that the kernel cannot have.
    """
    attend = layer.attend
    missing = {
        "chunked attention": attend.chunked,
        "linear biases": attend.alibi is not None,
        "learned biases": attend.relative is not None,
        "attention to an encoder": not attend.causal,
    }
    for kind in [kind for kind, asked in missing.items() if asked]:
        _log_fallback(kind)
        return xla.cache_shapes(num_pages, page_size, layer, dtype)
    try:
        return layout.cache_shape(num_pages, page_size, layer.num_kv_heads, layer.head_dim, dtype, latent=attend.latent is not None)
    except layout.UnsupportedShapeError as error:
        raise ConfigError(f"{error}; see --dtype and --block-size") from None


@functools.cache
def _log_fallback(kind: str) -> None:
    logger.warning("there is no TPU kernel for %s: its layers run on XLA's paged attention, which is slower", kind)


@dataclass(frozen=True)
class Attend:
    """The kernel, planned for a device. interpret: as of `pallas_call`, for tests on hosts without a TPU."""

    device: Device
    interpret: Any = False

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array | None,
        v: jax.Array | None,
        cache: Cache,
        metadata: AttentionMetadata,
        spec: AttendSpec,
        sinks: jax.Array | None = None,
        bias: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache]:
        """q [T, H, D], k and v [T, K, D], sinks [H] of one shard; returns ([T, H, D], cache). For a latent, v is None and the output
        [T, H, latent].

        Raises:
            ConfigError: the step's shape does not fit the device's memories; the message says what would.
        """
        if isinstance(cache, LayerCache):
            return xla.attend(q, k, v, cache, metadata, spec, sinks, bias)
        if k is None:
            k, v = _kept(cache, metadata, q.shape[-1], q.dtype)
        try:
            return tpu.attend(
                q,
                k,
                v,
                cache,
                metadata.page_table,
                metadata.q_starts,
                metadata.kv_lens,
                metadata.num_decodes,
                scale=spec.scale,
                window=spec.window,
                softcap=spec.softcap,
                sinks=sinks,
                latent=spec.latent,
                device=self.device,
                interpret=self.interpret,
            )
        except layout.UnsupportedShapeError as error:
            raise ConfigError(str(error)) from None


def _kept(cache: jax.Array, metadata: AttentionMetadata, head_dim: int, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Keys and values [T, K, D] of this step's tokens, which another layer has written. The kernel writes them once more."""
    row = jnp.minimum(metadata.token_rows, metadata.num_rows - 1)
    page, offset = metadata.page_table[row, metadata.positions // cache.shape[2]], metadata.positions % cache.shape[2]
    k, v = layout.unpack(cache[page, :, offset][:, :, None], dtype)
    return k[:, :, 0, :head_dim].astype(dtype), v[:, :, 0, :head_dim].astype(dtype)
