"""Paged attention on Hopper and Blackwell GPUs: the Mosaic GPU kernel of `pallas_kernels`, behind the contract of this package.

Its pages are those of `xla.py`, which takes over for shapes that the kernel refuses; said once.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Any

import jax

from jaxllm.ops.attention import xla
from jaxllm.ops.attention.metadata import AttentionMetadata, LayerCache
from jaxllm.specs import AttendSpec
from pallas_kernels.ragged_paged_attention.layout import UnsupportedShapeError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Attend:
    """interpret: `InterpretGPUParams`, for tests on hosts without a GPU. blackwell: which tensor cores the GPU has."""

    interpret: Any = None
    blackwell: bool = False

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array | None,
        v: jax.Array | None,
        cache: LayerCache,
        metadata: AttentionMetadata,
        spec: AttendSpec,
        sinks: jax.Array | None = None,
        bias: jax.Array | None = None,
    ) -> tuple[jax.Array, LayerCache]:
        """q [T, H, D], k and v [T, K, D], sinks [H] of one shard; returns ([T, H, D], cache). For a latent, v is None and the output
        [T, H, latent].
        """
        from pallas_kernels.ragged_paged_attention import gpu

        lacking = {
            "chunked attention": spec.chunked,
            "biases of scores": bias is not None,
            "layers that read another's or an encoder's keys and values": k is None,
        }
        if any(lacking.values()) or k is None:
            say_once("there is no GPU kernel for " + ", ".join(kind for kind, asked in lacking.items() if asked))
            return xla.attend(q, k, v, cache, metadata, spec, sinks, bias)
        try:
            gpu.check_shape(
                q.dtype, q.shape[1], k.shape[1], q.shape[2], cache.page_size, spec.latent, kept=cache.k.dtype, blackwell=self.blackwell
            )
        except UnsupportedShapeError as error:
            say_once(str(error))
            return xla.attend(q, k, v, cache, metadata, spec, sinks)
        out, (k_pages, v_pages) = gpu.attend(
            q,
            k,
            v,
            (cache.k, cache.v),
            metadata.page_table,
            metadata.q_starts,
            metadata.kv_lens,
            metadata.num_decodes,
            scale=spec.scale,
            window=spec.window,
            softcap=spec.softcap,
            sinks=sinks,
            latent=spec.latent,
            blackwell=self.blackwell,
            interpret=self.interpret,
        )
        return out, LayerCache(k_pages, v_pages)


@functools.cache
def say_once(reason: str) -> None:
    """Log why there is no kernel."""
    logger.warning("attention runs through XLA: %s", reason)
