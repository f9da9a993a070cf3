"""The rows of a step as recurrent layers see them, and how a recurrence runs over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# Tokens of a prompt chunk that are computed at once.
TILE = 64


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


# (state, inputs of a token) -> (state, output), both with a leading axis of rows.
Step = Callable[[jax.Array, Any], tuple[jax.Array, jax.Array]]
# (state of one row, inputs of TILE of its tokens, [TILE] whether they are) -> (state, outputs [TILE, ...]).
Tile = Callable[[jax.Array, Any, jax.Array], tuple[jax.Array, jax.Array]]


def recur(step: Step, tile: Tile, inputs: Any, pool: jax.Array, rows: StateRows) -> tuple[jax.Array, jax.Array]:
    """Run a recurrence: `step` for all decodes at once, `tile` for prompt chunks, one tile of one row after the other.

    Args:
        inputs: arrays with a leading axis of T tokens. T == R means a step of decodes only: no prompt code is traced then.
        pool: [N, ...] states by page.

    Returns:
        ([T, ...] outputs, zeros at padding tokens up to what the last tile of a row writes past it; the pool).
    """
    states, num_rows = rows.load(pool), rows.num_rows
    decodes = jnp.arange(num_rows) < rows.num_decodes
    new_states, out = step(states, jax.tree.map(lambda x: x[:num_rows], inputs))
    states, out = jnp.where(_like(decodes, states), new_states, states), jnp.where(_like(decodes, out), out, 0.0)
    num_tokens = rows.token_rows.shape[0]
    if num_tokens == num_rows:
        return out, rows.store(pool, states)

    lens = jnp.where(decodes, 0, rows.lens)
    ends = jnp.cumsum((lens + TILE - 1) // TILE)  # where each row's tiles end in the list of all tiles
    inputs = jax.tree.map(lambda x: _pad(x, TILE), inputs)

    def one_tile(index: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        states, out = carry
        row = jnp.minimum(jnp.sum(ends <= index), num_rows - 1)
        offset = (index - jnp.where(row > 0, ends[row - 1], 0)) * TILE
        start = rows.q_starts[row] + offset
        part = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, TILE), inputs)
        state, result = tile(states[row], part, offset + jnp.arange(TILE) < lens[row])
        # What a tile writes past its row is overwritten by the next row's tiles, which come later, or lies in the padding.
        return states.at[row].set(state), lax.dynamic_update_slice_in_dim(out, result, start, axis=0)

    out = _pad(out, num_tokens - num_rows + TILE)
    states, out = lax.fori_loop(0, ends[-1], one_tile, (states, out))
    return out[:num_tokens], rows.store(pool, states)


def _like(flags: jax.Array, x: jax.Array) -> jax.Array:
    """Flags [R] that broadcast against x [R, ...] or [N, ...]."""
    return flags.reshape(-1, *(1,) * (x.ndim - 1))


def _pad(x: jax.Array, count: int) -> jax.Array:
    return jnp.pad(x, ((0, count), *((0, 0),) * (x.ndim - 1)))
