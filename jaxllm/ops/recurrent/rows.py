"""The rows of a step as recurrent layers see them, and how a recurrence runs over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# Tokens of a prompt chunk that are computed at once, and rows that decode at once: each holds its state meanwhile.
TILE, DECODE_ROWS = 64, 32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StateRows:
    """The rows of a step, as in `AttentionMetadata`, with the pages of their states.

    q_starts: [R + 1] int32, first token of each row; padding rows have none.
    token_rows: [T] int32, row of each token; R for padding tokens.
    num_decodes: [] int32, rows of one token each, which come first.
    fresh: [R] bool, rows that start from zeros instead of a page.
    read, write: [R] int32, page of the state before the step, and of the state after it; 0 for padding rows.
    """

    q_starts: jax.Array
    token_rows: jax.Array
    num_decodes: jax.Array
    fresh: jax.Array
    read: jax.Array
    write: jax.Array

    @property
    def num_rows(self) -> int:
        return self.read.shape[0]

    @property
    def lens(self) -> jax.Array:
        """[R] tokens of each row."""
        return self.q_starts[1:] - self.q_starts[:-1]

    def load(self, pool: jax.Array) -> jax.Array:
        """The states [R, ...] before the step."""
        return jnp.where(_like(self.fresh, pool), 0.0, pool[self.read])

    def store(self, pool: jax.Array, states: jax.Array) -> jax.Array:
        """The pool with the states [R, ...] after the step."""
        return pool.at[self.write].set(states)


# (states [N, ...] of N rows, inputs of a token of each) -> (states, outputs [N, ...]).
Step = Callable[[jax.Array, Any], tuple[jax.Array, jax.Array]]
# (state of one row, inputs of TILE of its tokens, [TILE] whether they are) -> (state, outputs [TILE, ...]).
Tile = Callable[[jax.Array, Any, jax.Array], tuple[jax.Array, jax.Array]]


def recur(step: Step, tile: Tile, inputs: Any, pool: jax.Array, rows: StateRows) -> tuple[jax.Array, jax.Array]:
    """Run a recurrence: `step` for some decodes at once, `tile` for prompt chunks, one tile of one row after the other. Trip counts come
    from the lengths of the step, and states are read and written page by page: work and memory go with what there is to do.

    Args:
        inputs: arrays with a leading axis of T tokens. T == R means a step of decodes only: no prompt code is traced then.
        pool: [N, ...] states by page.

    Returns:
        ([T, ...] outputs, zeros at padding tokens but for what the last tile of a row writes past it; the pool).
    """
    num_tokens, num_rows = rows.token_rows.shape[0], rows.num_rows
    has_prompts = num_tokens > num_rows
    width = min(DECODE_ROWS, num_rows)
    rest = -num_rows % width
    fresh, read, write = (_pad(x, rest) for x in (rows.fresh, rows.read, rows.write))
    inputs = jax.tree.map(lambda x: _pad(x, TILE if has_prompts else rest), inputs)

    def part(x: jax.Array, start: jax.Array, count: int) -> jax.Array:
        return lax.dynamic_slice_in_dim(x, start, count)

    def some_decodes(index: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        pool, out = carry
        start = index * width
        states = pool[part(read, start, width)]
        states = jnp.where(_like(part(fresh, start, width), states), 0.0, states)
        states, y = step(states, jax.tree.map(lambda x: part(x, start, width), inputs))
        decodes = start + jnp.arange(width) < rows.num_decodes
        pool = pool.at[jnp.where(decodes, part(write, start, width), 0)].set(states)
        return pool, lax.dynamic_update_slice_in_dim(out, jnp.where(_like(decodes, y), y, 0.0), start, axis=0)

    some = jax.tree.map(lambda x: x[:width], inputs)
    y = jax.eval_shape(step, jax.ShapeDtypeStruct((width, *pool.shape[1:]), pool.dtype), some)[1]
    out = jnp.zeros((num_tokens + (TILE if has_prompts else rest), *y.shape[1:]), y.dtype)
    pool, out = lax.fori_loop(0, (rows.num_decodes + width - 1) // width, some_decodes, (pool, out))
    if not has_prompts:
        return out[:num_tokens], pool

    lens = jnp.where(jnp.arange(num_rows) < rows.num_decodes, 0, rows.lens)
    ends = jnp.cumsum((lens + TILE - 1) // TILE)  # where each row's tiles end in the list of all tiles

    def one_tile(index: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        pool, out = carry
        row = jnp.minimum(jnp.sum(ends <= index), num_rows - 1)
        offset = (index - jnp.where(row > 0, ends[row - 1], 0)) * TILE
        start = rows.q_starts[row] + offset
        # A row's first tile starts from its page to read, the others from what the one before them left.
        state = pool[jnp.where(offset == 0, read[row], write[row])]
        state = jnp.where(fresh[row] & (offset == 0), 0.0, state)
        state, y = tile(state, jax.tree.map(lambda x: part(x, start, TILE), inputs), offset + jnp.arange(TILE) < lens[row])
        # What a tile writes past its row is overwritten by the next row's tiles, which come later, or lies in the padding.
        return pool.at[write[row]].set(state), lax.dynamic_update_slice_in_dim(out, y, start, axis=0)

    pool, out = lax.fori_loop(0, ends[-1], one_tile, (pool, out))
    return out[:num_tokens], pool


def _like(flags: jax.Array, x: jax.Array) -> jax.Array:
    """Flags [R] that broadcast against x [R, ...] or [N, ...]."""
    return flags.reshape(-1, *(1,) * (x.ndim - 1))


def _pad(x: jax.Array, count: int) -> jax.Array:
    return jnp.pad(x, ((0, count), *((0, 0),) * (x.ndim - 1)))
