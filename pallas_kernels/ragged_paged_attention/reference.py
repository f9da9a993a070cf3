"""Ragged paged attention in plain jax.numpy: the oracle of the kernels, with their signature and cache layout.

Dims: T tokens, R rows, P pages a row, H heads, K KV heads, D head dim; N, W, S, L as in `layout.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_paged_attention import layout


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    cache: jax.Array,
    page_table: jax.Array,
    q_starts: jax.Array,
    kv_lens: jax.Array,
    num_decodes: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    latent: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Write the step's keys and values into their pages, and attend to everything that each query may see.

    Args:
        q: [T, H, D]; head h reads KV head h // (H / K).
        k, v: [T, K, D] of the step's tokens, in the dtype of the cache's elements (of 8 bits: see `scales.py`); with a `latent` K is 1, and
            v None.
        cache: [N, W, S, L] words.
        page_table: [R, P] int32, pages of each row in order of position (0, the sink, where none is needed).
        q_starts: [R + 1] int32, first token of each row; a row may have none.
        kv_lens: [R] int32, positions of each row after this step; 0 for padding rows.
        num_decodes: [] int32; rows before it have one token each, at the same index.
        window: positions that a query sees, itself included.
        softcap: scores become softcap * tanh(score / softcap).
        sinks: [H] float32, a score of each head that takes part in the softmax and has no value.
        latent: the first dims of a key that are its value as well (absorbed multi-head latent attention, arXiv 2405.04434).

    Returns:
        [T, H, D], or [T, H, latent], zeros for padding tokens, and the cache.
    """
    del num_decodes
    num_tokens, _, head_dim = q.shape
    num_rows, num_pages = page_table.shape
    num_kv, page_size = k.shape[1], cache.shape[2] * layout.positions_per_word(k.dtype)
    token = jnp.arange(num_tokens)
    row = jnp.sum(q_starts[None, 1:] <= token[:, None], axis=1)
    real = row < num_rows
    row = jnp.minimum(row, num_rows - 1)
    position = jnp.where(real, kv_lens[row] - (q_starts[row + 1] - token), 0)

    page = jnp.where(real, page_table[row, position // page_size], 0)
    cache = layout.store(cache, layout.pack(k, v, k.dtype), page, position % page_size, k.dtype)

    words = jnp.swapaxes(cache[page_table], 1, 2).reshape(num_rows, cache.shape[1], num_pages * cache.shape[2], -1)
    # What lies behind a row's end is nobody's: not even NaN times zero may come of it.
    known = jnp.arange(num_pages * page_size)[:, None] < kv_lens[:, None, None, None]
    unpacked = layout.unpack(words, k.dtype, latent=latent is not None)
    keys, values = (jnp.where(known, x, 0)[..., :head_dim][row] for x in unpacked)  # [T, K, P * S, D]
    grouped = q.astype(jnp.float32).reshape(num_tokens, num_kv, -1, head_dim)
    scores = jnp.einsum("tkgd,tkpd->tkgp", grouped, keys, precision="highest") * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    key_position = jnp.arange(scores.shape[-1])
    visible = key_position <= position[:, None]
    if window is not None:
        visible &= key_position > position[:, None] - window
    scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
    if sinks is not None:
        sink = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(num_kv, -1, 1), (*scores.shape[:-1], 1))
        scores = jnp.concatenate((scores, sink), axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : key_position.shape[0]]
    out = jnp.einsum("tkgp,tkpd->tkgd", weights, values[..., :latent], precision="highest").reshape(*q.shape[:2], -1)
    return jnp.where(real[:, None, None], out, 0).astype(q.dtype), cache
