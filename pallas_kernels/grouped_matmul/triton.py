"""Grouped products for what `gpu.py` does not do (GPUs before Hopper, float32), in Triton: XLA's multiply every row with every group's
matrix there, and copy rows for it. Pallas has deprecated Triton; nothing replaces it on those GPUs, and it stays as long as jax has it.

A program takes a tile of rows, one of the groups that have rows in it, and a tile of columns; it writes its group's rows alone.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.grouped_matmul.visits import plan_visits

triton: Any
try:
    from jax.experimental.pallas import triton
except ImportError:  # A future jax drops it.
    triton = None

_COLUMNS = 128  # of a tile
_INPUTS = 64  # multiplied at once
_LEAST_ROWS, _MOST_ROWS = 16, 64  # of a tile: what tensor cores take, what registers hold


def ragged_dot(x: jax.Array, matrices: jax.Array, counts: jax.Array, *, interpret: bool = False) -> jax.Array:
    """As `lax.ragged_dot`: x [N, M], rows of one group together, by matrices [G, M, F] for counts [G] of rows: [N, F] in x's dtype.

    Rows behind the last group's hold anything. Where jax has no Triton any more, XLA's product is right, and slow.
    """
    if triton is None:
        return lax.ragged_dot(x, matrices, counts)
    num_rows = len(x)
    num_groups, _, num_out = matrices.shape
    rows = min(max(_LEAST_ROWS, pl.next_power_of_2(num_rows // num_groups)), _MOST_ROWS)
    visits = plan_visits(counts, pl.cdiv(num_rows, rows) + num_groups, rows, alignment=rows)
    return pl.pallas_call(
        lambda *refs: _multiply(*refs, rows=rows),
        grid=(visits.shape[1], pl.cdiv(num_out, _COLUMNS)),
        in_specs=[pl.BlockSpec()] * 3,
        out_specs=pl.BlockSpec(),
        out_shape=jax.ShapeDtypeStruct((num_rows, num_out), x.dtype),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=4),
        name="grouped_matmul",
        interpret=interpret,
    )(visits, x, matrices)


def _multiply(visits, x, matrices, out, *, rows: int):
    visit, column = pl.program_id(0), pl.program_id(1)
    num_in, num_out = matrices.shape[1:]
    group, row, first, last = (visits[field, visit] for field in range(4))
    at = row + jnp.arange(rows)
    columns = column * _COLUMNS + jnp.arange(_COLUMNS)
    owned, real = ((at >= first) & (at < last))[:, None], (columns < num_out)[None]

    @pl.when(first < last)
    def _() -> None:
        def add(turn, total):
            inputs = turn * _INPUTS + jnp.arange(_INPUTS)
            there = inputs < num_in
            left = triton.load(x.at[at[:, None], inputs[None]], mask=owned & there[None], other=0)
            right = triton.load(matrices.at[group, inputs[:, None], columns[None]], mask=there[:, None] & real, other=0)
            precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
            return total + jnp.dot(left, right, precision=precision, preferred_element_type=jnp.float32)

        total = lax.fori_loop(0, pl.cdiv(num_in, _INPUTS), add, jnp.zeros((rows, _COLUMNS), jnp.float32))
        triton.store(out.at[at[:, None], columns[None]], total.astype(out.dtype), mask=owned & real)
