"""The selective scan of Mamba (Gu and Dao, 2023, arXiv:2312.00752)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxllm.ops.recurrent.rows import StateRows, recur

Inputs = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def selective_scan(
    x: jax.Array, dt: jax.Array, a: jax.Array, b: jax.Array, c: jax.Array, pool: jax.Array, rows: StateRows
) -> tuple[jax.Array, jax.Array]:
    """state = exp(dt * a) * state + dt * x b', y = state c, for I channels with states of S.

    Args:
        x: [T, I].
        dt: [T, I], not negative.
        a: [I, S], negative.
        b, c: [T, S], one for all channels.
        pool: [N, I, S].

    Returns:
        ([T, I], the pool).
    """

    def step(state: jax.Array, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
        x, dt, b, c = inputs
        state = state * jnp.exp(dt[..., None] * a) + (dt * x)[..., None] * b[:, None]
        return state, jnp.einsum("ris,rs->ri", state, c, precision="highest")

    def tile(state: jax.Array, inputs: Inputs, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, dt, b, c = inputs
        dt = jnp.where(valid[:, None], dt, 0.0)  # nothing decays and nothing is added past the row's end

        def join(first: tuple[jax.Array, jax.Array], second: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            return first[0] * second[0], first[1] * second[0] + second[1]

        decay, added = lax.associative_scan(join, (jnp.exp(dt[..., None] * a), (dt * x)[..., None] * b[:, None]))
        states = decay * state + added  # [C, I, S]
        return states[-1], jnp.einsum("tis,ts->ti", states, c, precision="highest")

    return recur(step, tile, (x, dt, b, c), pool, rows)
