"""Grouped products for NVIDIA GPUs, in Triton: XLA's multiply every row with every group's matrix there, and copy rows for it.

A program takes a tile of rows, one of the groups that have rows in it, and a tile of columns; it writes its group's rows alone. A tile
that several groups share is so visited once for each, which is at most one visit a group more than there are tiles (the scheme of
MegaBlocks: Gale et al., 2022, arXiv:2211.15841).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

triton: Any
try:
    from jax.experimental.pallas import triton
except ImportError:  # A future jax drops it.
    triton = None

_COLUMNS = 128  # of a tile
_INPUTS = 64  # multiplied at once
_LEAST_ROWS, _MOST_ROWS = 16, 64  # of a tile: what tensor cores take, what registers hold


class _Visits(NamedTuple):
    """By visit, int32: the group, the tile of rows, and the rows [start, end) of the group in it (none: nothing is to be done)."""

    group: jax.Array
    tile: jax.Array
    start: jax.Array
    end: jax.Array


def ragged_dot(x: jax.Array, matrices: jax.Array, counts: jax.Array, *, interpret: bool = False) -> jax.Array:
    """As `lax.ragged_dot`: x [N, M], rows of one group together, by matrices [G, M, F] for counts [G] of rows: [N, F] in x's dtype.

    Rows behind the last group's hold anything. Where jax has no Triton any more, XLA's product is right, and slow.
    """
    if triton is None:
        return lax.ragged_dot(x, matrices, counts)
    num_rows = len(x)
    num_groups, _, num_out = matrices.shape
    rows = min(max(_LEAST_ROWS, pl.next_power_of_2(num_rows // num_groups)), _MOST_ROWS)
    visits = _visits(counts, pl.cdiv(num_rows, rows) + num_groups, rows)
    return pl.pallas_call(
        lambda *refs: _multiply(*refs, rows=rows),
        grid=(visits.group.shape[0], pl.cdiv(num_out, _COLUMNS)),
        in_specs=[pl.BlockSpec()] * (2 + len(visits)),
        out_specs=pl.BlockSpec(),
        out_shape=jax.ShapeDtypeStruct((num_rows, num_out), x.dtype),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=4),
        name="grouped_matmul",
        interpret=interpret,
    )(*visits, x, matrices)


def _visits(counts: jax.Array, size: int, rows: int) -> _Visits:
    """All visits, and empty ones up to `size`."""
    ends = jnp.cumsum(counts)
    starts = ends - counts
    each = jnp.where(counts > 0, (ends - 1) // rows - starts // rows + 1, 0)
    visit_ends = jnp.cumsum(each)
    index = jnp.arange(size)
    group = jnp.minimum(jnp.sum(visit_ends <= index[:, None], axis=1), len(counts) - 1)
    tile = starts[group] // rows + index - (visit_ends - each)[group]
    start = jnp.maximum(starts[group], tile * rows)
    end = jnp.where(index < visit_ends[-1], jnp.minimum(ends[group], (tile + 1) * rows), start)
    return _Visits(*(part.astype(jnp.int32) for part in (group, tile, start, end)))


def _multiply(group, tile, start, end, x, matrices, out, *, rows: int):
    visit, column = pl.program_id(0), pl.program_id(1)
    num_in, num_out = matrices.shape[1:]
    mine, first, last = group[visit], start[visit], end[visit]
    at = tile[visit] * rows + jnp.arange(rows)
    columns = column * _COLUMNS + jnp.arange(_COLUMNS)
    owned, real = ((at >= first) & (at < last))[:, None], (columns < num_out)[None]

    @pl.when(first < last)
    def _() -> None:
        def add(turn, total):
            inputs = turn * _INPUTS + jnp.arange(_INPUTS)
            there = inputs < num_in
            left = triton.load(x.at[at[:, None], inputs[None]], mask=owned & there[None], other=0)
            right = triton.load(matrices.at[mine, inputs[:, None], columns[None]], mask=there[:, None] & real, other=0)
            precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
            return total + jnp.dot(left, right, precision=precision, preferred_element_type=jnp.float32)

        total = lax.fori_loop(0, pl.cdiv(num_in, _INPUTS), add, jnp.zeros((rows, _COLUMNS), jnp.float32))
        triton.store(out.at[at[:, None], columns[None]], total.astype(out.dtype), mask=owned & real)
