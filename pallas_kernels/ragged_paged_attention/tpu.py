"""Ragged paged attention for TPUs: a Mosaic kernel in three parts.

1. `_append` writes the keys and values of prompt chunks into their pages.
2. `_decode` takes rows of one token: it fetches the row's pages, merges the new token into the last one, writes that part of the page back
   while it computes, and attends.
3. `_prefill` takes tiles of consecutive prompt tokens, whatever rows they are of, each piece of a tile against the pages of its row.

A step of decodes only runs the second part alone. All three stream pages from HBM by page tables in scalar memory, one block ahead of the
computation and across the borders of rows and tiles, so that the transfer engine never idles. What one fetch brings (long transfers) and
what one product covers (score tiles that fit) are separate sizes, see `tuning.py`. The softmax is online (Milakov and Gimelshein, arXiv
1805.02867); the division of work follows the ideas of Ragged Paged Attention (arXiv 2604.15464), the page layout is our own (`layout.py`).

Dims are those of `reference.py`. M: rows of a score tile, a KV head's queries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.devices import Device
from pallas_kernels.ragged_paged_attention import layout, work
from pallas_kernels.ragged_paged_attention.layout import LANES, SUBLANES, UnsupportedShapeError
from pallas_kernels.ragged_paged_attention.tuning import APPEND_DEPTH, Blocks, Shape, choose_blocks

# A masked score is far below the floor that running maxima start from, so that its exponential is zero even before anything was seen.
_MASKED = -1e30
_FLOOR = -1e29
_UNROLLED_HEADS = 8


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
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
    shape = shape_of(q, k, cache, page_table)
    if blocks is None:
        if device is None:
            raise ValueError("give the device to plan for, or blocks")
        blocks = choose_blocks(shape, device)
    call = _Call(shape, blocks, scale, window, softcap, sinks is not None, k.dtype, interpret)
    num_rows, num_decodes = shape.num_rows, num_decodes.astype(jnp.int32)
    words = layout.pack(k, v, k.dtype)
    table = page_table.reshape(-1)
    floor = _start_maxima(sinks, shape)
    if shape.num_tokens == num_rows:
        return _decode(q, words, cache, table, kv_lens, num_decodes, floor, call)
    cache = _append(
        words,
        cache,
        work.append_items(page_table, q_starts, kv_lens, num_decodes, page_size=shape.page_size, num_tokens=shape.num_tokens),
        call,
    )
    decoded, cache = _decode(q[:num_rows], words[:num_rows], cache, table, kv_lens, num_decodes, floor, call)
    out = _prefill(q, cache, table, q_starts, kv_lens, num_decodes, floor, call)
    decoded = jnp.pad(decoded, ((0, shape.num_tokens - num_rows), (0, 0), (0, 0)))
    return jnp.where(jnp.arange(shape.num_tokens)[:, None, None] < num_decodes, decoded, out), cache


def shape_of(q: Any, k: Any, cache: Any, page_table: Any) -> Shape:
    """The shape that block sizes depend on, of arrays or abstract ones.

    Raises:
        UnsupportedShapeError: queries and keys of different dtypes.
    """
    if q.dtype != k.dtype or k.dtype.name not in layout.DTYPES:
        raise UnsupportedShapeError(
            f"queries of {q.dtype.name} and keys of {k.dtype.name}: the TPU kernel wants both bfloat16 or both float32"
        )
    return Shape(
        num_tokens=q.shape[0],
        num_rows=page_table.shape[0],
        pages_per_row=page_table.shape[1],
        page_size=cache.shape[2],
        num_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        word_heads=cache.shape[1],
        padded_dim=cache.shape[3],
        itemsize=q.dtype.itemsize,
    )


@dataclass(frozen=True)
class _Call:
    """What is static of a call, for all parts."""

    shape: Shape
    blocks: Blocks
    scale: float
    window: int | None
    softcap: float | None
    has_sinks: bool
    dtype: jnp.dtype
    interpret: Any

    def params(self, vmem_bytes: int) -> dict[str, Any]:
        """The compiler may use what was planned and a reserve for what it spills."""
        return {
            "compiler_params": pltpu.CompilerParams(
                dimension_semantics=("arbitrary",), vmem_limit_bytes=vmem_bytes + vmem_bytes // 2 + 2**22
            ),
            "interpret": self.interpret,
        }


def _start_maxima(sinks: jax.Array | None, shape: Shape) -> jax.Array:
    """[K, padded group, 128] where running maxima start: a sink is a score that was seen before anything else, with weight one."""
    if sinks is None:
        return jnp.full((shape.num_kv_heads, shape.padded_group, LANES), _FLOOR)
    heads = jnp.maximum(sinks.astype(jnp.float32), _FLOOR).reshape(shape.num_kv_heads, shape.group)
    heads = jnp.pad(heads, ((0, 0), (0, shape.padded_group - shape.group)), constant_values=_FLOOR)
    return jnp.broadcast_to(heads[..., None], (*heads.shape, LANES))


# ------------------------------------------------------------------------------------------------------------------- streaming


@dataclass(frozen=True)
class _Stream:
    """Blocks of the pages of consecutive work items, fetched one block ahead into two slots.

    table [R * P], items and slot (which slot comes next) are in scalar memory; cache [N, W, S, L] in HBM; buffer [2, B, W, S, L] in vector
    memory; arrived: a DMA semaphore for each slot.
    """

    table: Any
    items: work.Items
    cache: Any
    buffer: Any
    arrived: Any
    slot: Any
    pages_per_row: int

    @property
    def pages(self) -> int:
        return self.buffer.shape[1]

    @property
    def positions(self) -> int:
        return self.pages * self.buffer.shape[3]

    def page_id(self, item: Any, index: Any) -> Any:
        """The id of page `index` of an item's row."""
        return self.table[self.items.row[item] * self.pages_per_row + index]

    def _each_page(self, item: Any, block: Any, slot: Any, act: Callable[[Any], None]) -> None:
        """Act on the copy of every page of the block that the item needs; the same list whether starting or waiting."""
        size = self.buffer.shape[3]
        first = jnp.maximum(block * self.pages, self.items.low[item] // size)
        last = jnp.minimum((block + 1) * self.pages, pl.cdiv(self.items.high[item], size))

        def one(index: Any, _: None) -> None:
            target = self.buffer.at[slot, index - block * self.pages]
            act(pltpu.make_async_copy(self.cache.at[self.page_id(item, index)], target, self.arrived.at[slot]))

        lax.fori_loop(first, last, one, None)

    def fetch(self, item: Any, block: Any, slot: Any) -> None:
        self._each_page(item, block, slot, lambda copy: copy.start())

    def wait(self, item: Any, block: Any, slot: Any) -> None:
        self._each_page(item, block, slot, lambda copy: copy.wait())

    def start(self, number: Any) -> None:
        """Fetch the first block of the first item, once a call."""
        self.slot[0] = 0

        pl.when(number > 0)(lambda: self.fetch(0, self.items.low[0] // self.positions, 0))

    def run(self, item: Any, number: Any, compute: Callable[[Any, Any, Any], None]) -> None:
        """Call compute(block, slot, is_last) for each block of an item, the next block (maybe of the next item) already on its way."""
        last_block = pl.cdiv(self.items.high[item], self.positions) - 1

        def one(block: Any, _: None) -> None:
            slot = self.slot[0]
            is_last = block == last_block
            following = jnp.where(is_last, item + 1, item)
            following_block = jnp.where(is_last, self.items.low[item + 1] // self.positions, block + 1)

            pl.when(following < number)(lambda: self.fetch(following, following_block, 1 - slot))

            self.wait(item, block, slot)
            compute(block, slot, is_last)
            self.slot[0] = 1 - slot

        lax.fori_loop(self.items.low[item] // self.positions, last_block + 1, one, None)


@dataclass(frozen=True)
class _Softmax:
    """An unfinished softmax of each KV head in vector memory: running maxima and sums [K, M, 128] (equal lanes), values [K, M, L]."""

    top: Any
    total: Any
    acc: Any
    call: _Call

    def start(self) -> None:
        """Set sums and values; the caller sets the maxima."""
        self.total[...] = jnp.full(self.total.shape, 1.0 if self.call.has_sinks else 0.0, jnp.float32)
        self.acc[...] = jnp.zeros(self.acc.shape, jnp.float32)

    def add(self, head: Any, q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array | None) -> None:
        """Take in keys and values [B, L] of one head for queries [M, L]; visible [M, B] (None: all)."""
        scores = _product(q, k, 1) * self.call.scale
        if self.call.softcap is not None:
            scores = self.call.softcap * jnp.tanh(scores * (1 / self.call.softcap))
        if visible is not None:
            scores = jnp.where(visible, scores, _MASKED)
        before = self.top[head]
        top = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.exp(scores - top[:, :1])
        shrink = jnp.exp(before - top)
        self.total[head] = self.total[head] * shrink + jnp.sum(weights, axis=1, keepdims=True)
        self.acc[head] = self.acc[head] * shrink[:, :1] + _product(weights.astype(v.dtype), v, 0)
        self.top[head] = top

    def value(self, head: Any) -> jax.Array:
        """[M, L] float32; zeros where nothing was seen."""
        return self.acc[head] / jnp.maximum(self.total[head][:, :1], 1e-30)


def _product(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
    """[M, C] by `b` contracted over its `axis`, in float32; float32 operands are not rounded to bfloat16."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(a, b, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32, precision=precision)


def _keys_values(
    buffer: Any, slot: Any, pages: Any, head: Any, dtype: jnp.dtype, known: tuple[Any, Any] | None
) -> tuple[jax.Array, jax.Array]:
    """Keys and values [B, L] of one head in some pages of a slot. Of an edge block only positions [begin, end) are `known`: others may not
    have been fetched, and become zero, since whatever bits lie there might be NaN.
    """

    def words(word_head: Any) -> jax.Array:
        found = buffer[slot, pages, word_head].reshape(-1, buffer.shape[-1])
        if known is None:
            return found
        offset = lax.broadcasted_iota(jnp.int32, found.shape, 0)
        return jnp.where((offset >= known[0]) & (offset < known[1]), found, jnp.zeros_like(found))

    if buffer.dtype == jnp.uint32:
        keys, values = layout.split_word(words(head))
        return keys.astype(dtype), values.astype(dtype)
    return words(2 * head), words(2 * head + 1)


def _each_head(num_heads: int, act: Callable[[Any], None]) -> None:
    """Unrolled as far as code size allows: the compiler overlaps one head's products with another's exponentials."""
    unrolled = next(n for n in range(min(_UNROLLED_HEADS, num_heads), 0, -1) if num_heads % n == 0)

    def some(turn: Any, _: None) -> None:
        for i in range(unrolled):
            act(turn * unrolled + i)

    if unrolled == num_heads:
        some(0, None)
    else:
        lax.fori_loop(0, num_heads // unrolled, some, None)


def _padded(x: jax.Array, axis: int, size: int) -> jax.Array:
    return jnp.pad(x, [(0, size - n if i == axis % x.ndim else 0) for i, n in enumerate(x.shape)])


# ---------------------------------------------------------------------------------------------------------------------- append


def _append(words: jax.Array, cache: jax.Array, items: work.PageItems, call: _Call) -> jax.Array:
    """Write words [T, W, L] into the pages of `items`; returns the cache."""
    shape = call.shape
    size, reach = shape.page_size, shape.page_size + SUBLANES
    # Positions of a page that are not new may lie before the first token or after the last one.
    source = jnp.pad(jnp.swapaxes(words, 0, 1), ((0, 0), (size, reach), (0, 0)))

    def kernel(number, page, source_start, begin, end, source, _, cache, window, pages, read, written):
        def read_new(item: Any) -> Any:
            slot = lax.rem(item, APPEND_DEPTH)
            start = pl.multiple_of((source_start[item] + size) // SUBLANES * SUBLANES, SUBLANES)
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

            slot, shift = lax.rem(item, APPEND_DEPTH), lax.rem(source_start[item] + size, SUBLANES)
            offset = lax.broadcasted_iota(jnp.int32, (size, shape.padded_dim), 0)
            fresh = (offset >= begin[item]) & (offset < end[item])

            def merge(head: Any) -> None:
                if shape.padded_dim == LANES:
                    moved = window[slot, head, pl.ds(shift, size), :]
                else:  # rows that start anywhere can be loaded from arrays of one tile of lanes only
                    moved = pltpu.roll(window[slot, head], lax.rem(reach - shift, reach), 0)[:size]
                pages[slot, head] = jnp.where(fresh, moved, pages[slot, head])

            _each_head(shape.word_heads, merge)
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


# ---------------------------------------------------------------------------------------------------------------------- decode


def _decode(
    q: jax.Array,
    words: jax.Array,
    cache: jax.Array,
    table: jax.Array,
    kv_lens: jax.Array,
    num_decodes: jax.Array,
    floor: jax.Array,
    call: _Call,
) -> tuple[jax.Array, jax.Array]:
    """q [R, H, D], words [R, W, L]; returns [R, H, D], zeros for rows past num_decodes, and the cache."""
    shape, blocks = call.shape, call.blocks
    num_rows, num_heads, head_dim = q.shape
    rows_a_turn = min(blocks.decode_rows, num_rows)
    turns = pl.cdiv(num_rows, rows_a_turn)
    heads, group = shape.num_kv_heads, shape.padded_group
    q = _padded(_padded(q.reshape(num_rows, heads, shape.group, head_dim), 2, group), 3, shape.padded_dim)
    q, words = _padded(q, 0, turns * rows_a_turn), _padded(words, 0, turns * rows_a_turn)
    items = work.decode_items(kv_lens, call.window)

    def kernel(number, table, row, low, high, floor, q, words, _, out, cache, buffer, top, total, acc, arrived, written, slot):
        stream = _Stream(table, work.Items(row, low, high), cache, buffer, arrived, slot, shape.pages_per_row)
        softmax = _Softmax(top, total, acc, call)
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
                start = pl.multiple_of(lax.rem(position, shape.page_size) // SUBLANES * SUBLANES, SUBLANES)
                rows = pl.ds(start, SUBLANES)

                def write() -> Any:
                    target = cache.at[stream.page_id(item, block * stream.pages + page), :, rows, :]
                    return pltpu.make_async_copy(buffer.at[slot, page, :, rows, :], target, written.at[0])

                @pl.when(is_last)
                def _() -> None:
                    is_new = lax.broadcasted_iota(jnp.int32, (SUBLANES, shape.padded_dim), 0) == lax.rem(position, SUBLANES)
                    for head in range(shape.word_heads):
                        old = buffer[slot, page, head, rows, :]
                        buffer[slot, page, head, rows, :] = jnp.where(is_new, words[local, pl.ds(head, 1), :], old)
                    write().start()

                _attend_row(item, local, block, slot)

                pl.when(is_last)(lambda: write().wait())

            stream.run(item, number[0], compute)

            def finish(head: Any) -> None:
                out[local, head] = softmax.value(head).astype(out.dtype)

            _each_head(heads, finish)

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
                    keys, values = _keys_values(buffer, slot, pages, head, call.dtype, known)
                    softmax.add(head, q[local, head], keys, values, visible)

                _on_edge((begin > 0) | (end < positions), lambda edge: _each_head(heads, lambda head: one_head(head, edge)))

            lax.fori_loop(*_turns(low[item] - start, high[item] - start, positions, stream.positions), one, None)

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
                pl.BlockSpec((rows_a_turn, heads, group, shape.padded_dim), by_rows),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            scratch_shapes=[
                pltpu.VMEM((2, blocks.decode_pages, *cache.shape[1:]), cache.dtype),
                pltpu.VMEM((heads, group, LANES), jnp.float32),
                pltpu.VMEM((heads, group, LANES), jnp.float32),
                pltpu.VMEM((heads, group, shape.padded_dim), jnp.float32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((1,)),
                pltpu.SMEM((1,), jnp.int32),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(cache.shape, cache.dtype)],
        input_output_aliases={len(scalars) + 3: 1},
        name="ragged_paged_decode",
        **call.params(blocks.decode_vmem(shape)),
    )(*scalars, floor, q, words, cache)
    return out[:num_rows, :, : shape.group, :head_dim].reshape(num_rows, num_heads, head_dim), cache


def _on_edge(edge: Any, act: Callable[[bool], None]) -> None:
    """Run the body with masks only where something is out of sight: masks cost a third of the vector work."""

    pl.when(edge)(lambda: act(True))
    pl.when(jnp.logical_not(edge))(lambda: act(False))


def _turns(low: Any, high: Any, size: int, limit: int) -> tuple[Any, Any]:
    """Compute blocks of `size` that touch [low, high) of a fetched block of `limit` positions."""
    return jnp.maximum(low, 0) // size, pl.cdiv(jnp.minimum(high, limit), size)


# --------------------------------------------------------------------------------------------------------------------- prefill


def _prefill(
    q: jax.Array,
    cache: jax.Array,
    table: jax.Array,
    q_starts: jax.Array,
    kv_lens: jax.Array,
    num_decodes: jax.Array,
    floor: jax.Array,
    call: _Call,
) -> jax.Array:
    """q [T, H, D]; returns [T, H, D], zeros for tokens of no row and of decodes."""
    shape, blocks = call.shape, call.blocks
    num_tokens, num_heads, head_dim = q.shape
    heads, group, tile = shape.num_kv_heads, shape.group, blocks.query_tile
    num_tiles, rows = pl.cdiv(num_tokens, tile), group * tile
    # The queries of one KV head and tile as one matrix, a group's heads one after the other.
    q = _padded(q.reshape(num_tokens, heads, group, head_dim), 0, num_tiles * tile).reshape(num_tiles, tile, heads, group, head_dim)
    q = _padded(q.transpose(0, 2, 3, 1, 4).reshape(num_tiles, heads, rows, head_dim), -1, shape.padded_dim)
    first, items, tiles = work.prefill_items(q_starts, kv_lens, num_decodes, call.window, tile=tile, num_tiles=num_tiles)

    def kernel(first, table, row, low, high, base, begin, end, floor, q, cache, out, buffer, top, total, acc, arrived, slot):
        stream = _Stream(table, work.Items(row, low, high), cache, buffer, arrived, slot, shape.pages_per_row)
        softmax = _Softmax(top, total, acc, call)
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
                        keys, values = _keys_values(buffer, slot, pages, head, call.dtype, known)
                        softmax.add(head, q[head], keys, values, visible)

                    _on_edge(edge, lambda edge: _each_head(heads, lambda head: one_head(head, edge)))

                lax.fori_loop(*_turns(low[item] - start, high[item] - start, positions, stream.positions), one, None)

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
        _each_head(heads, finish)

    scalars = (first, table, *items, *tiles)
    by_tile = pl.BlockSpec((None, heads, rows, shape.padded_dim), lambda i, *_: (i, 0, 0, 0))
    out = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(num_tiles,),
            in_specs=[
                pl.BlockSpec(floor.shape, lambda i, *_: (0, 0, 0)),
                by_tile,
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=by_tile,
            scratch_shapes=[
                pltpu.VMEM((2, blocks.prefill_pages, *cache.shape[1:]), cache.dtype),
                pltpu.VMEM((heads, rows, LANES), jnp.float32),
                pltpu.VMEM((heads, rows, LANES), jnp.float32),
                pltpu.VMEM((heads, rows, shape.padded_dim), jnp.float32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SMEM((1,), jnp.int32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        name="ragged_paged_prefill",
        **call.params(blocks.prefill_vmem(shape)),
    )(*scalars, floor, q, cache)
    out = out.reshape(num_tiles, heads, group, tile, shape.padded_dim).transpose(0, 3, 1, 2, 4)
    return out.reshape(num_tiles * tile, num_heads, shape.padded_dim)[:num_tokens, :, :head_dim]
