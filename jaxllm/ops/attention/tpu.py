"""Paged attention on TPUs: the Mosaic kernel of `pallas_kernels`, behind the contract of this package.

Its pages are one array a layer, [N, W, S, L] words (`pallas_kernels/ragged_paged_attention/layout.py`), which splits over devices along W.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.errors import ConfigError
from jaxllm.ops.attention.metadata import AttentionMetadata
from jaxllm.specs import AttendSpec
from pallas_kernels.ragged_paged_attention import layout, tpu
from pallas_kernels.ragged_paged_attention.tuning import Device


def cache_shapes(num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
    """The abstract pages of one layer.

    Raises:
        ConfigError: a dtype or a block_size that the kernel cannot have.
    """
    try:
        return layout.cache_shape(num_pages, page_size, num_kv_heads, head_dim, dtype)
    except layout.UnsupportedShapeError as error:
        raise ConfigError(f"{error}; see --dtype and --block-size") from None


@dataclass(frozen=True)
class Attend:
    """The kernel, planned for a device. interpret: as of `pallas_call`, for tests on hosts without a TPU."""

    device: Device
    interpret: Any = False

    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, cache: jax.Array, metadata: AttentionMetadata, spec: AttendSpec
    ) -> tuple[jax.Array, jax.Array]:
        """q [T, H, D], k and v [T, K, D] of one shard; returns ([T, H, D], cache).

        Raises:
            ConfigError: the step's shape does not fit the device's memories; the message says what would.
        """
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
                device=self.device,
                interpret=self.interpret,
            )
        except layout.UnsupportedShapeError as error:
            raise ConfigError(str(error)) from None
