"""What attention must know of a step, and what it keeps between steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxllm.specs import AttendSpec

# The pages of one layer as its backend keeps them: arrays whose axis 1 is split over devices.
Cache = Any


class LayerCache(NamedTuple):
    """The `xla` backend's pages of one layer: `k` [N, K, D, S], `v` [N, K, S, D] for N pages of S positions. Page 0 is a sink.

    Keys lie transposed, so that the scores of a page are a plain row-major product. Where values are part of the keys (a latent), there
    is no `v`.
    """

    k: jax.Array
    v: jax.Array | None

    @property
    def page_size(self) -> int:
        return self.k.shape[3]

    def values(self, pages: jax.Array, spec: AttendSpec) -> jax.Array:
        """The values of some pages [...]: [..., K, S, D]."""
        if self.v is None:
            return jnp.swapaxes(self.k[pages][..., : spec.latent, :], -1, -2)
        return self.v[pages]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionMetadata:
    """The rows of a step. Rows [0, num_decodes) have one token each and come first; the tokens of a row are consecutive.

    page_table: [R, P] int32, pages of each row in order of position (0 where none).
    q_starts: [R + 1] int32, first token of each row; padding rows have none.
    kv_lens: [R] int32, positions of each row after this step; 0 for padding rows.
    positions: [T] int32, position of each token in its sequence.
    token_rows: [T] int32, row of each token; R for padding tokens.
    num_decodes: [] int32.
    """

    page_table: jax.Array
    q_starts: jax.Array
    kv_lens: jax.Array
    positions: jax.Array
    token_rows: jax.Array
    num_decodes: jax.Array

    @property
    def num_rows(self) -> int:
        return self.kv_lens.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[0]


def write_pages(cache: LayerCache, k: jax.Array | None, v: jax.Array | None, metadata: AttentionMetadata) -> LayerCache:
    """Store k, v [T, K, D] of this step's tokens, where there are any, in their pages; padding tokens go to the sink.

    What is not finite (a float16 overflow) is stored as zero: masked positions have weight zero, and zero times NaN would carry one
    request's overflow into others.
    """
    if k is None:
        return cache
    size = cache.page_size
    row = jnp.minimum(metadata.token_rows, metadata.num_rows - 1)
    page = metadata.page_table[row, metadata.positions // size]
    page = jnp.where(metadata.token_rows < metadata.num_rows, page, 0)
    offset = metadata.positions % size
    keys = cache.k.at[page, :, :, offset].set(_finite(k, cache.k.dtype))
    if cache.v is None or v is None:
        return LayerCache(keys, None)
    return LayerCache(keys, cache.v.at[page, :, offset, :].set(_finite(v, cache.v.dtype)))


def _finite(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return jnp.where(jnp.isfinite(x), x, 0).astype(dtype)


def position_bias(bias: jax.Array, ahead: jax.Array) -> jax.Array:
    """[H, ...] what is added to the scores of keys that lie `ahead` [...] of their query, in positions (mostly negative).

    bias: slopes [H] (ALiBi), or [H, 2 * n + 1] for keys from -n to n ahead, beyond which nothing changes (T5).
    """
    if bias.ndim == 1:
        return bias.reshape(-1, *(1,) * ahead.ndim) * ahead
    most = bias.shape[1] // 2
    return bias[:, jnp.clip(ahead, -most, most) + most].astype(jnp.float32)


def first_visible(positions: jax.Array, spec: AttendSpec) -> jax.Array:
    """The first position that queries at `positions` see."""
    if spec.window is None:
        return jnp.zeros_like(positions)
    if spec.chunked:
        return positions - positions % spec.window
    return jnp.maximum(positions + 1 - spec.window, 0)
