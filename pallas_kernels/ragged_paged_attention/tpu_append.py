"""The first part of the TPU kernel: keys and values of prompt chunks go into their pages."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ragged_paged_attention import layout, work
from pallas_kernels.ragged_paged_attention.layout import LANES
from pallas_kernels.ragged_paged_attention.tpu_stream import Call, each_head, select
from pallas_kernels.ragged_paged_attention.tuning import APPEND_DEPTH


def append(words: jax.Array, cache: jax.Array, items: work.PageItems, call: Call) -> jax.Array:
    """Write words [T, W, L] into the pages of `items`; returns the cache."""
    shape = call.shape
    size, unit = shape.page_size, shape.tile_rows
    reach = size + unit
    # Positions of a page that are not new may lie before the first token or after the last one.
    source = jnp.pad(jnp.swapaxes(words, 0, 1), ((0, 0), (size, reach), (0, 0)))

    def kernel(number, page, source_start, begin, end, source, _, cache, window, pages, read, written):
        def read_new(item: Any) -> Any:
            slot = lax.rem(item, APPEND_DEPTH)
            start = pl.multiple_of((source_start[item] + size) // unit * unit, unit)
            return pltpu.make_async_copy(source.at[:, pl.ds(start, reach), :], window.at[slot], read.at[slot])

        def read_old(item: Any) -> Any:
            slot = lax.rem(item, APPEND_DEPTH)
            return pltpu.make_async_copy(cache.at[page[item]], pages.at[slot], read.at[slot])

        def write(item: Any) -> Any:
            slot = lax.rem(item, APPEND_DEPTH)
            return pltpu.make_async_copy(pages.at[slot], cache.at[page[item]], written.at[slot])

        def fetch(item: Any) -> None:
            read_new(item).start()

            pl.when(end[item] - begin[item] < size)(lambda: read_old(item).start())

        pl.when(number[0] > 0)(lambda: fetch(0))

        def one(item: Any, _: None) -> None:
            pl.when(item + 1 >= APPEND_DEPTH)(lambda: write(item + 1 - APPEND_DEPTH).wait())

            pl.when(item + 1 < number[0])(lambda: fetch(item + 1))

            read_new(item).wait()

            pl.when(end[item] - begin[item] < size)(lambda: read_old(item).wait())

            slot, shift = lax.rem(item, APPEND_DEPTH), lax.rem(source_start[item] + size, unit)
            offset = lax.broadcasted_iota(jnp.int32, (shape.page_rows, shape.padded_dim), 0) * shape.packing
            fresh = (offset >= begin[item]) & (offset < end[item])

            def merge(head: Any) -> None:
                if shape.padded_dim == LANES and shape.word_bytes == 4:
                    moved = window[slot, head, pl.ds(shift, size), :]
                else:  # rows that start anywhere can be loaded from arrays of one tile of lanes only, and of 32 bits, as rolled ones
                    wide = window[slot, head] if shape.word_bytes == 4 else window[slot, head].astype(jnp.float32)
                    moved = pltpu.roll(wide, lax.rem(reach - shift, reach), 0)[:size]
                if shape.packing > 1:
                    new = pltpu.bitcast(lax.bitcast_convert_type(moved, jnp.int32).astype(jnp.int8), jnp.uint32)
                    mask = layout.bytes_between(begin[item] - offset, end[item] - offset)
                    pages[slot, head] = (pages[slot, head] & ~mask) | (new & mask)
                else:
                    pages[slot, head] = select(fresh, moved, pages[slot, head])

            each_head(shape.word_heads, merge)
            write(item).start()

        lax.fori_loop(0, number[0], one, None)

        def drain(item: Any, _: None) -> None:
            write(item).wait()

        lax.fori_loop(jnp.maximum(number[0] + 1 - APPEND_DEPTH, 0), number[0], drain, None)

    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(items),
            grid=(1,),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 2,
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[
                pltpu.VMEM((APPEND_DEPTH, shape.word_heads, reach, shape.padded_dim), cache.dtype),
                pltpu.VMEM((APPEND_DEPTH, *cache.shape[1:]), cache.dtype),
                pltpu.SemaphoreType.DMA((APPEND_DEPTH,)),
                pltpu.SemaphoreType.DMA((APPEND_DEPTH,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(cache.shape, cache.dtype),
        input_output_aliases={len(items) + 1: 0},
        name="ragged_paged_append",
        **call.params(call.blocks.append_vmem(shape)),
    )(*items, source, cache)
