"""The gated delta rule (Yang, Kautz and Hatamizadeh, 2024, arXiv:2412.06464), chunked by the WY form of its section 3."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

from jaxllm.ops.recurrent.rows import StateRows, recur

Inputs = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]


def gated_delta_rule(
    q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, beta: jax.Array, pool: jax.Array, rows: StateRows
) -> tuple[jax.Array, jax.Array]:
    """state = exp(decay) * state; state += k (beta * (v - state' k))'; y = state' q, for G key heads with H value heads each.

    Args:
        q, k: [T, G, D], shared by the value heads of a key head.
        v: [T, G, H, E].
        decay: [T, G, H], not positive.
        beta: [T, G, H], 0 to 1.
        pool: [N, G, H, D, E].

    Returns:
        ([T, G, H, E], the pool).
    """

    def step(state: jax.Array, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
        q, k, v, decay, beta = inputs
        state = state * jnp.exp(decay)[..., None, None]
        known = jnp.einsum("rghde,rgd->rghe", state, k, precision="highest")
        state = state + k[:, :, None, :, None] * (beta[..., None] * (v - known))[..., None, :]
        return state, jnp.einsum("rghde,rgd->rghe", state, q, precision="highest")

    def tile(state: jax.Array, inputs: Inputs, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
        q, k, v, decay, beta = inputs
        # Past the row's end nothing decays and nothing is learned.
        decay, beta = (jnp.moveaxis(jnp.where(valid[:, None, None], x, 0.0), 0, -1) for x in (decay, beta))  # [G, H, C]
        q, k = (jnp.swapaxes(x, 0, 1) for x in (q, k))  # [G, C, D]
        v = jnp.moveaxis(v, 0, 2)  # [G, H, C, E]
        total = jnp.cumsum(decay, axis=-1)  # log of the decay since the tile's begin
        moved = jnp.exp(total)[..., None]
        causal = jnp.tril(jnp.ones((q.shape[1],) * 2, bool))
        between = jnp.exp(jnp.where(causal, total[..., :, None] - total[..., None, :], -jnp.inf))  # [G, H, C, C]

        # What each token writes depends on what those before it in the tile wrote: one triangular system a head.
        met = jnp.einsum("gid,gjd->gij", k, k, precision="highest")[:, None] * between * beta[..., None]
        system = jnp.tril(met, -1) + jnp.eye(q.shape[1])
        known = jnp.einsum("gid,ghde->ghie", k, state, precision="highest") * moved
        written = solve_triangular(system, beta[..., None] * (v - known), lower=True, unit_diagonal=True)

        scores = jnp.einsum("gid,gjd->gij", q, k, precision="highest")[:, None] * between
        y = jnp.einsum("ghij,ghje->ghie", scores, written, precision="highest")
        y += jnp.einsum("gid,ghde->ghie", q, state, precision="highest") * moved
        left = jnp.exp(total[..., -1:] - total)[..., None]  # decay from each token to the tile's end
        state = state * moved[..., -1:, :] + jnp.einsum("gjd,ghje->ghde", k, written * left, precision="highest")
        return state, jnp.moveaxis(y, 2, 0)

    return recur(step, tile, (q, k, v, decay, beta), pool, rows)
