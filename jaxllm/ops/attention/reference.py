"""The oracle: attention over the whole padded page table of each row, one row at a time. Slow and plain; tests only."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxllm.ops.attention.metadata import AttentionMetadata, LayerCache, first_visible, position_bias, write_pages
from jaxllm.specs import AttendSpec


def attend(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    cache: LayerCache,
    metadata: AttentionMetadata,
    spec: AttendSpec,
    sinks: jax.Array | None = None,
    bias: jax.Array | None = None,
) -> tuple[jax.Array, LayerCache]:
    """q [T, H, D], k and v [T, K, D], sinks [H]; returns ([T, H, D], cache). Padding tokens get zeros."""
    cache = write_pages(cache, k, v, metadata)
    num_tokens, num_heads, head_dim = q.shape
    num_kv = cache.k.shape[1]
    group = num_heads // num_kv

    row = jnp.minimum(metadata.token_rows, metadata.num_rows - 1)
    pages = metadata.page_table[row]  # [T, P]
    keys = jnp.moveaxis(cache.k[pages], -1, 2).reshape(num_tokens, -1, num_kv, head_dim).astype(jnp.float32)
    values = jnp.moveaxis(cache.values(pages, spec), 3, 2).astype(jnp.float32)
    values = values.reshape(num_tokens, -1, num_kv, values.shape[-1])

    grouped = q.astype(jnp.float32).reshape(num_tokens, num_kv, group, head_dim)
    scores = jnp.einsum("tkgd,tpkd->tkgp", grouped, keys, precision="highest") * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * jnp.tanh(scores / spec.softcap)
    key_position = jnp.arange(keys.shape[1])
    if bias is not None:
        added = position_bias(bias, key_position[None] - metadata.positions[:, None])
        scores += jnp.moveaxis(added, 0, 1).reshape(scores.shape)
    position = metadata.positions if spec.causal else metadata.kv_lens[row] - 1
    visible = key_position[None] <= position[:, None]
    visible &= key_position[None] >= first_visible(position, spec)[:, None]
    scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
    if sinks is not None:
        column = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(num_kv, group, 1), (num_tokens, num_kv, group, 1))
        scores = jnp.concatenate([scores, column], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : keys.shape[1]]
    out = jnp.einsum("tkgp,tpkd->tkgd", weights, values, precision="highest").reshape(num_tokens, num_heads, -1)
    real = metadata.token_rows < metadata.num_rows
    return jnp.where(real[:, None, None], out, 0).astype(q.dtype), cache
