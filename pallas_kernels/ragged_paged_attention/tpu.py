"""Ragged paged attention for TPUs: a Mosaic kernel in three parts.

1. `tpu_append.py` writes the keys and values of prompt chunks into their pages.
2. `tpu_decode.py` takes rows of one token: it fetches the row's pages, merges the new token into the last one, writes that part of the
   page back while it computes, and attends.
3. `tpu_prefill.py` takes tiles of consecutive prompt tokens, whatever rows they are of, each piece of a tile against the pages of its row.

A step of decodes only runs the second part alone. All three stream pages from HBM by page tables in scalar memory, one block ahead of the
computation and across the borders of rows and tiles, so that the transfer engine never idles. What one fetch brings (long transfers) and
what one product covers (score tiles that fit) are separate sizes, see `tuning.py`. The softmax is online (Milakov and Gimelshein, arXiv
1805.02867); the division of work follows the ideas of Ragged Paged Attention (arXiv 2604.15464), the page layout is our own (`layout.py`).

Dims are those of `reference.py`. M: rows of a score tile, a KV head's queries.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.devices import Device
from pallas_kernels.ragged_paged_attention import layout, work
from pallas_kernels.ragged_paged_attention.layout import LANES, UnsupportedShapeError
from pallas_kernels.ragged_paged_attention.tpu_append import append
from pallas_kernels.ragged_paged_attention.tpu_decode import decode
from pallas_kernels.ragged_paged_attention.tpu_prefill import prefill
from pallas_kernels.ragged_paged_attention.tpu_stream import FLOOR, Call
from pallas_kernels.ragged_paged_attention.tuning import Blocks, Shape, choose_blocks


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
    device: Device | None = None,
    blocks: Blocks | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """As `reference.attend`. T == R means a step of decodes only.

    Args:
        device: what to plan memory for; needed unless `blocks` are given.
        interpret: as of `pallas_call`.

    Raises:
        UnsupportedShapeError: the shape cannot run on the device; the message says which one could.
    """
    shape = shape_of(q, k, cache, page_table, latent)
    if blocks is None:
        if device is None:
            raise ValueError("give the device to plan for, or blocks")
        blocks = choose_blocks(shape, device)
    call = Call(shape, blocks, scale, window, softcap, sinks is not None, q.dtype, k.dtype, interpret)
    num_rows, num_decodes = shape.num_rows, num_decodes.astype(jnp.int32)
    words = layout.pack(k, v, k.dtype)
    table = page_table.reshape(-1)
    floor = _start_maxima(sinks, shape)
    if shape.num_tokens == num_rows:
        return decode(q, words, cache, table, kv_lens, num_decodes, floor, call)
    cache = append(
        words,
        cache,
        work.append_items(page_table, q_starts, kv_lens, num_decodes, page_size=shape.page_size, num_tokens=shape.num_tokens),
        call,
    )
    decoded, cache = decode(q[:num_rows], words[:num_rows], cache, table, kv_lens, num_decodes, floor, call)
    out = prefill(q, cache, table, q_starts, kv_lens, num_decodes, floor, call)
    decoded = jnp.pad(decoded, ((0, shape.num_tokens - num_rows), (0, 0), (0, 0)))
    return jnp.where(jnp.arange(shape.num_tokens)[:, None, None] < num_decodes, decoded, out), cache


def shape_of(q: Any, k: Any, cache: Any, page_table: Any, latent: int | None = None) -> Shape:
    """The shape that block sizes depend on, of arrays or abstract ones.

    Raises:
        UnsupportedShapeError: queries and keys of dtypes that do not go together.
    """
    packing = layout.positions_per_word(k.dtype)
    if q.dtype.name not in ("bfloat16", "float32") or k.dtype.name not in layout.DTYPES or (packing == 1 and q.dtype != k.dtype):
        raise UnsupportedShapeError(
            f"queries of {q.dtype.name} and keys of {k.dtype.name}: the TPU kernel wants both bfloat16 or both float32, or keys of 8 bits"
        )
    return Shape(
        num_tokens=q.shape[0],
        num_rows=page_table.shape[0],
        pages_per_row=page_table.shape[1],
        page_size=cache.shape[2] * packing,
        num_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        word_heads=cache.shape[1],
        padded_dim=cache.shape[3],
        itemsize=q.dtype.itemsize,
        latent=latent,
        packing=packing,
    )


def _start_maxima(sinks: jax.Array | None, shape: Shape) -> jax.Array:
    """[K, padded group, 128] where running maxima start: a sink is a score that was seen before anything else, with weight one."""
    if sinks is None:
        return jnp.full((shape.num_kv_heads, shape.padded_group, LANES), FLOOR)
    heads = jnp.maximum(sinks.astype(jnp.float32), FLOOR).reshape(shape.num_kv_heads, shape.group)
    heads = jnp.pad(heads, ((0, 0), (0, shape.padded_group - shape.group)), constant_values=FLOOR)
    return jnp.broadcast_to(heads[..., None], (*heads.shape, LANES))
