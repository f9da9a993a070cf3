"""State space duality: the recurrence of Mamba 2 (Dao and Gu, 2024, arXiv:2405.21060), chunked as in its section 6."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxllm.ops.recurrent.rows import StateRows, recur

Inputs = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def state_space_dual(
    x: jax.Array, dt: jax.Array, a: jax.Array, b: jax.Array, c: jax.Array, pool: jax.Array, rows: StateRows
) -> tuple[jax.Array, jax.Array]:
    """state = exp(dt * a) * state + dt * x b', y = state c, for G groups of H heads of P dims with states of S.

    Args:
        x: [T, G, H, P].
        dt: [T, G, H], not negative.
        a: [G, H], negative.
        b, c: [T, G, S], one for the heads of a group.
        pool: [N, G, H, P, S].

    Returns:
        ([T, G, H, P], the pool).
    """

    def step(state: jax.Array, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
        x, dt, b, c = inputs
        decay = jnp.exp(dt * a)[..., None, None]
        state = state * decay + (dt[..., None] * x)[..., None] * b[:, :, None, None]
        return state, jnp.einsum("rghps,rgs->rghp", state, c, precision="highest")

    def tile(state: jax.Array, inputs: Inputs, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, dt, b, c = inputs
        dt = jnp.where(valid[:, None, None], dt, 0.0)  # nothing decays and nothing is added past the row's end
        total = jnp.cumsum(dt * a, axis=0)  # [C, G, H] log of the decay since the tile's begin
        moved = jnp.exp(total)
        x = dt[..., None] * x
        causal = jnp.tril(jnp.ones((x.shape[0],) * 2, bool))[..., None, None]
        decay = jnp.exp(jnp.where(causal, total[:, None] - total[None], -jnp.inf))  # [C, C, G, H]
        scores = jnp.einsum("igs,jgs->ijg", c, b, precision="highest")[..., None] * decay
        y = jnp.einsum("ijgh,jghp->ighp", scores, x, precision="highest")
        y += jnp.einsum("igs,ghps->ighp", c, state, precision="highest") * moved[..., None]
        left = jnp.exp(total[-1] - total)  # decay from each token to the tile's end
        added = jnp.einsum("jghp,jgs->ghps", x * left[..., None], b, precision="highest")
        return state * moved[-1][..., None, None] + added, y

    return recur(step, tile, (x, dt, b, c), pool, rows)
