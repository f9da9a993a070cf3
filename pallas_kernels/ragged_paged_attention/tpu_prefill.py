"""The third part of the TPU kernel: tiles of consecutive prompt tokens, whatever rows they are of."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ragged_paged_attention import work
from pallas_kernels.ragged_paged_attention.layout import LANES
from pallas_kernels.ragged_paged_attention.tpu_stream import Call, Softmax, Stream, compute_turns, each_head, keys_values, on_edge, padded


def prefill(
    q: jax.Array,
    cache: jax.Array,
    table: jax.Array,
    q_starts: jax.Array,
    kv_lens: jax.Array,
    num_decodes: jax.Array,
    floor: jax.Array,
    call: Call,
) -> jax.Array:
    """q [T, H, D]; returns [T, H, D], or [T, H, latent], zeros for tokens of no row and of decodes."""
    shape, blocks = call.shape, call.blocks
    num_tokens, num_heads, head_dim = q.shape
    heads, group, tile = shape.num_kv_heads, shape.group, blocks.query_tile
    num_tiles, rows = pl.cdiv(num_tokens, tile), group * tile
    # The queries of one KV head and tile as one matrix, a group's heads one after the other.
    q = padded(q.reshape(num_tokens, heads, group, head_dim), 0, num_tiles * tile).reshape(num_tiles, tile, heads, group, head_dim)
    q = padded(q.transpose(0, 2, 3, 1, 4).reshape(num_tiles, heads, rows, head_dim), -1, shape.padded_dim)
    first, items, tiles = work.prefill_items(q_starts, kv_lens, num_decodes, call.window, tile=tile, num_tiles=num_tiles)

    def kernel(first, table, row, low, high, base, begin, end, floor, q, cache, out, buffer, top, total, acc, arrived, slot):
        stream = Stream(table, work.Items(row, low, high), cache, buffer, arrived, slot, shape)
        softmax = Softmax(top, total, acc, call)
        turn, number = pl.program_id(0), first[num_tiles]

        pl.when(turn == 0)(lambda: stream.start(number))

        for i in range(group):
            start = floor[:, i : i + 1, :]
            top[:, i * tile : (i + 1) * tile, :] = jnp.broadcast_to(start, (heads, tile, LANES))
        softmax.start()

        def one_item(item: Any, _: None) -> None:
            positions = blocks.prefill_compute_pages * shape.page_size

            def compute(block: Any, slot: Any, _: Any) -> None:
                start = block * stream.positions

                def one(turn: Any, _: None) -> None:
                    at = start + turn * positions
                    pages = pl.ds(turn * blocks.prefill_compute_pages, blocks.prefill_compute_pages)
                    edge = (begin[item] > 0) | (end[item] < tile) | (at + positions - 1 > base[item])
                    if call.window is not None:
                        edge |= at <= base[item] + tile - 1 - call.window

                    def one_head(head: Any, edge: bool) -> None:
                        known = visible = None
                        if edge:
                            known = (low[item] - at, high[item] - at)
                            visible = _visible(at)
                        keys, values = keys_values(buffer, slot, pages, head, call, known)
                        softmax.add(head, q[head], keys, values, visible)

                    on_edge(edge, lambda edge: each_head(heads, lambda head: one_head(head, edge)))

                lax.fori_loop(*compute_turns(low[item] - start, high[item] - start, positions, stream.positions), one, None)

            def _visible(at: Any) -> jax.Array:
                """[M, B]: causal, within the window, and of a token of this item's row."""
                token = lax.broadcasted_iota(jnp.int32, (rows, positions), 0) & (tile - 1)
                behind = base[item] - at + token - lax.broadcasted_iota(jnp.int32, (rows, positions), 1)
                visible = (behind >= 0) & (token >= begin[item]) & (token < end[item])
                return visible if call.window is None else visible & (behind < call.window)

            stream.run(item, number, compute)

        lax.fori_loop(first[turn], first[turn + 1], one_item, None)

        def finish(head: Any) -> None:
            out[head] = softmax.value(head).astype(out.dtype)

        # Tokens outside of every item have seen nothing: a sum of zero, or of one sink, over no values.
        each_head(heads, finish)

    scalars = (first, table, *items, *tiles)

    def by_tile(dims: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, heads, rows, dims), lambda i, *_: (i, 0, 0, 0))

    out = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(num_tiles,),
            in_specs=[
                pl.BlockSpec(floor.shape, lambda i, *_: (0, 0, 0)),
                by_tile(shape.padded_dim),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=by_tile(shape.value_dim),
            scratch_shapes=[
                pltpu.VMEM((2, blocks.prefill_pages, *cache.shape[1:]), cache.dtype),
                pltpu.VMEM((heads, rows, LANES), jnp.float32),
                pltpu.VMEM((heads, rows, LANES), jnp.float32),
                pltpu.VMEM((heads, rows, shape.value_dim), jnp.float32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SMEM((1,), jnp.int32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((*q.shape[:3], shape.value_dim), q.dtype),
        name="ragged_paged_prefill",
        **call.params(blocks.prefill_vmem(shape)),
    )(*scalars, floor, q, cache)
    out = out.reshape(num_tiles, heads, group, tile, shape.value_dim).transpose(0, 3, 1, 2, 4)
    return out.reshape(num_tiles * tile, num_heads, shape.value_dim)[:num_tokens, :, : shape.latent or head_dim]
