"""Which tiles of rows are multiplied with which group's matrix."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def plan_visits(counts: jax.Array, size: int, rows: int, alignment: int) -> jax.Array:
    """All visits, in order, and empty ones up to `size`, for counts [G] of rows; a group's tiles begin at a multiple of `alignment`.

    A tile that several groups share is visited once for each (the scheme of MegaBlocks: Gale et al., 2022, arXiv:2211.15841). There is at
    most one visit a group with rows, and one for each `rows` rows, where `alignment` is `rows`; else one more a group with rows.

    Returns:
        [4, size] int32: the group, the tile's first row, and the rows [start, end) of the group in it (none: nothing is to be done).
    """
    ends = jnp.cumsum(counts)
    starts = ends - counts
    first = starts // alignment * alignment
    each = jnp.where(counts > 0, (ends - 1 - first) // rows + 1, 0)
    visit_ends = jnp.cumsum(each)
    index = jnp.arange(size)
    group = jnp.minimum(jnp.sum(visit_ends <= index[:, None], axis=1), len(counts) - 1)
    row = first[group] + (index - (visit_ends - each)[group]) * rows
    start = jnp.maximum(starts[group], row)
    end = jnp.where(index < visit_ends[-1], jnp.minimum(ends[group], row + rows), start)
    return jnp.stack((group, row, start, end)).astype(jnp.int32)
