"""The oracle: attention over the whole padded page table of each row, one row at a time. Slow and plain; tests only."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxllm.ops.attention.metadata import AttentionMetadata, LayerCache, write_pages
from jaxllm.specs import AttendSpec


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, cache: LayerCache, metadata: AttentionMetadata, spec: AttendSpec
) -> tuple[jax.Array, LayerCache]:
    """q [T, H, D], k and v [T, K, D]; returns ([T, H, D], cache). Padding tokens get zeros."""
    cache = write_pages(cache, k, v, metadata)
    num_tokens, num_heads, head_dim = q.shape
    num_kv = k.shape[1]
    group = num_heads // num_kv

    row = jnp.minimum(metadata.token_rows, metadata.num_rows - 1)
    pages = metadata.page_table[row]  # [T, P]
    keys = jnp.moveaxis(cache.k[pages], -1, 2).reshape(num_tokens, -1, num_kv, head_dim).astype(jnp.float32)
    values = jnp.moveaxis(cache.v[pages], 3, 2).reshape(num_tokens, -1, num_kv, head_dim).astype(jnp.float32)

    grouped = q.astype(jnp.float32).reshape(num_tokens, num_kv, group, head_dim)
    scores = jnp.einsum("tkgd,tpkd->tkgp", grouped, keys, precision="highest") * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * jnp.tanh(scores / spec.softcap)
    key_position = jnp.arange(keys.shape[1])
    visible = key_position[None] <= metadata.positions[:, None]
    if spec.window is not None:
        visible &= key_position[None] > metadata.positions[:, None] - spec.window
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, -jnp.inf), axis=-1)
    out = jnp.einsum("tkgp,tpkd->tkgd", weights, values, precision="highest").reshape(q.shape)
    real = metadata.token_rows < metadata.num_rows
    return jnp.where(real[:, None, None], out, 0).astype(q.dtype), cache
