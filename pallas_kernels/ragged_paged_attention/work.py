"""The work lists of a step: which pages each part of the kernel reads and writes. Small integer arrays, computed by XLA once a step
(every layer asks for the same, and the compiler merges them) and read from scalar memory.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Items(NamedTuple):
    """Work items, each the positions [low, high) of one row; arrays [items + 1] int32, the last entry unused."""

    row: jax.Array
    low: jax.Array
    high: jax.Array


class TileItems(NamedTuple):
    """Where the queries of a prefill item lie: tokens [begin, end) of its tile; token 0 of the tile would be at position `base`."""

    base: jax.Array
    begin: jax.Array
    end: jax.Array


def decode_items(kv_lens: jax.Array, window: int | None) -> Items:
    """One item a row, all rows [R]; only the decodes' are used."""
    high = jnp.pad(kv_lens, (0, 1))
    low = jnp.zeros_like(high) if window is None else jnp.maximum(high - window, 0)
    return Items(jnp.arange(high.shape[0], dtype=jnp.int32), low, high)


def prefill_items(
    q_starts: jax.Array, kv_lens: jax.Array, num_decodes: jax.Array, window: int | None, *, tile: int, num_tiles: int
) -> tuple[jax.Array, Items, TileItems]:
    """Cut the prompt tokens at every tile and at every row: each piece is an item.

    Returns the first item of each tile [num_tiles + 1], the last entry being their number, and the items in order of their tokens.
    """
    num_rows = kv_lens.shape[0]
    total = q_starts[num_rows]
    cuts = jnp.concatenate((jnp.arange(num_tiles, dtype=jnp.int32) * tile, q_starts))
    cuts = jnp.sort(jnp.where((cuts >= q_starts[num_decodes]) & (cuts < total), cuts, total))
    repeated = jnp.concatenate((cuts[1:] == cuts[:-1], jnp.array([False])))
    begin = jnp.sort(jnp.where(repeated, total, cuts))
    end = jnp.concatenate((begin[1:], total[None]))
    row = jnp.minimum(jnp.sum(q_starts[None, 1:] <= begin[:, None], axis=1, dtype=jnp.int32), num_rows - 1)
    index = begin // tile
    base = kv_lens[row] - q_starts[row + 1] + index * tile
    begin_in_tile, end_in_tile = begin - index * tile, end - index * tile
    low = jnp.zeros_like(base) if window is None else jnp.maximum(base + begin_in_tile + 1 - window, 0)
    listed = jnp.where(begin < total, index, num_tiles)
    first = jnp.sum(listed[None, :] < jnp.arange(num_tiles + 1)[:, None], axis=1, dtype=jnp.int32)
    return first, Items(row, low, base + end_in_tile), TileItems(base, begin_in_tile, end_in_tile)


class PageItems(NamedTuple):
    """Pages that prompt tokens are written to.

    number [1]: how many; page: its id; source: where the token of its first position would be (may be negative); begin, end: positions
    within the page that are new.
    """

    number: jax.Array
    page: jax.Array
    source: jax.Array
    begin: jax.Array
    end: jax.Array


def append_items(
    page_table: jax.Array, q_starts: jax.Array, kv_lens: jax.Array, num_decodes: jax.Array, *, page_size: int, num_tokens: int
) -> PageItems:
    """Every page that a row behind the decodes writes to. A row of n tokens touches at most n / S + 2 pages."""
    num_rows = kv_lens.shape[0]
    lens = q_starts[1:] - q_starts[:-1]
    starts = kv_lens - lens
    writes = (jnp.arange(num_rows) >= num_decodes) & (lens > 0)
    counts = jnp.where(writes, (kv_lens - 1) // page_size - starts // page_size + 1, 0)
    ends = jnp.cumsum(counts)
    item = jnp.arange(num_tokens // page_size + 2 * min(num_rows, num_tokens) + 1)
    row = jnp.minimum(jnp.sum(ends[None, :] <= item[:, None], axis=1), num_rows - 1)
    index = starts[row] // page_size + item - (ends[row] - counts[row])
    first = index * page_size
    values = (
        ends[-1:],
        page_table[row, jnp.minimum(index, page_table.shape[1] - 1)],
        q_starts[row] + first - starts[row],
        jnp.maximum(starts[row] - first, 0),
        jnp.minimum(kv_lens[row] - first, page_size),
    )
    return PageItems(*(value.astype(jnp.int32) for value in values))
