"""The second part of the TPU kernel: rows of one token, each of which is merged into its last page."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ragged_paged_attention import work
from pallas_kernels.ragged_paged_attention.layout import LANES
from pallas_kernels.ragged_paged_attention.tpu_stream import (
    Call,
    Softmax,
    Stream,
    compute_turns,
    each_head,
    keys_values,
    on_edge,
    padded,
    select,
)


def decode(
    q: jax.Array,
    words: jax.Array,
    cache: jax.Array,
    table: jax.Array,
    kv_lens: jax.Array,
    num_decodes: jax.Array,
    floor: jax.Array,
    call: Call,
) -> tuple[jax.Array, jax.Array]:
    """q [R, H, D], words [R, W, L]; returns [R, H, D], or [R, H, latent], zeros for rows past num_decodes, and the cache."""
    shape, blocks = call.shape, call.blocks
    num_rows, num_heads, head_dim = q.shape
    rows_a_turn = min(blocks.decode_rows, num_rows)
    turns = pl.cdiv(num_rows, rows_a_turn)
    heads, group, unit = shape.num_kv_heads, shape.padded_group, shape.tile_rows
    q = padded(padded(q.reshape(num_rows, heads, shape.group, head_dim), 2, group), 3, shape.padded_dim)
    q, words = padded(q, 0, turns * rows_a_turn), padded(words, 0, turns * rows_a_turn)
    items = work.decode_items(kv_lens, call.window)

    def kernel(number, table, row, low, high, floor, q, words, _, out, cache, buffer, top, total, acc, arrived, written, slot):
        stream = Stream(table, work.Items(row, low, high), cache, buffer, arrived, slot, shape)
        softmax = Softmax(top, total, acc, call)
        first = pl.program_id(0) * rows_a_turn
        out[...] = jnp.zeros(out.shape, out.dtype)

        pl.when(first == 0)(lambda: stream.start(number[0]))

        def one_row(item: Any, _: None) -> None:
            local = item - first
            top[...] = floor[...]
            softmax.start()

            def compute(block: Any, slot: Any, is_last: Any) -> None:
                position = high[item] - 1 - block * stream.positions  # of the new token
                page = position // shape.page_size
                row = lax.rem(position, shape.page_size) // shape.packing
                rows = pl.ds(pl.multiple_of(row // unit * unit, unit), unit)

                def write() -> Any:
                    target = cache.at[stream.page_id(item, block * stream.pages + page), :, rows, :]
                    return pltpu.make_async_copy(buffer.at[slot, page, :, rows, :], target, written.at[0])

                @pl.when(is_last)
                def _() -> None:
                    is_new = lax.broadcasted_iota(jnp.int32, (unit, shape.padded_dim), 0) == lax.rem(row, unit)
                    for head in range(shape.word_heads):
                        old, new = buffer[slot, page, head, rows, :], words[local, pl.ds(head, 1), :]
                        if shape.packing > 1:
                            shift = (8 * lax.rem(position, shape.packing)).astype(jnp.uint32)
                            byte = jnp.uint32(0xFF) << shift
                            new = (old & ~byte) | ((new << shift) & byte)
                        buffer[slot, page, head, rows, :] = select(is_new, new, old)
                    write().start()

                _attend_row(item, local, block, slot)

                pl.when(is_last)(lambda: write().wait())

            stream.run(item, number[0], compute)

            def finish(head: Any) -> None:
                out[local, head] = softmax.value(head).astype(out.dtype)

            each_head(heads, finish)

        def _attend_row(item: Any, local: Any, block: Any, slot: Any) -> None:
            positions = blocks.decode_compute_pages * shape.page_size
            start = block * stream.positions

            def one(turn: Any, _: None) -> None:
                at = start + turn * positions
                begin, end = low[item] - at, high[item] - at
                pages = pl.ds(turn * blocks.decode_compute_pages, blocks.decode_compute_pages)

                def one_head(head: Any, edge: bool) -> None:
                    known = visible = None
                    if edge:
                        known = (begin, end)
                        offset = lax.broadcasted_iota(jnp.int32, (group, positions), 1)
                        visible = (offset >= begin) & (offset < end)
                    keys, values = keys_values(buffer, slot, pages, head, call, known)
                    softmax.add(head, q[local, head], keys, values, visible)

                on_edge((begin > 0) | (end < positions), lambda edge: each_head(heads, lambda head: one_head(head, edge)))

            lax.fori_loop(*compute_turns(low[item] - start, high[item] - start, positions, stream.positions), one, None)

        lax.fori_loop(first, jnp.minimum(first + rows_a_turn, number[0]), one_row, None)

    scalars = (num_decodes[None], table, *items)
    by_rows = lambda i, *_: (i, 0, 0, 0)
    out, cache = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(turns,),
            in_specs=[
                pl.BlockSpec((heads, group, LANES), lambda i, *_: (0, 0, 0)),
                pl.BlockSpec((rows_a_turn, heads, group, shape.padded_dim), by_rows),
                pl.BlockSpec((rows_a_turn, shape.word_heads, shape.padded_dim), lambda i, *_: (i, 0, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=[
                pl.BlockSpec((rows_a_turn, heads, group, shape.value_dim), by_rows),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            scratch_shapes=[
                pltpu.VMEM((2, blocks.decode_pages, *cache.shape[1:]), cache.dtype),
                pltpu.VMEM((heads, group, LANES), jnp.float32),
                pltpu.VMEM((heads, group, LANES), jnp.float32),
                pltpu.VMEM((heads, group, shape.value_dim), jnp.float32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((1,)),
                pltpu.SMEM((1,), jnp.int32),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct((*q.shape[:3], shape.value_dim), q.dtype), jax.ShapeDtypeStruct(cache.shape, cache.dtype)],
        input_output_aliases={len(scalars) + 3: 1},
        name="ragged_paged_decode",
        **call.params(blocks.decode_vmem(shape)),
    )(*scalars, floor, q, words, cache)
    out = out[:num_rows, :, : shape.group, : shape.latent or head_dim]
    return out.reshape(num_rows, num_heads, -1), cache
