"""Causal depthwise convolution of a few positions; its state is the last inputs of a row."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxllm.ops.recurrent.rows import StateRows


def causal_conv(x: jax.Array, taps: jax.Array, bias: jax.Array | None, pool: jax.Array, rows: StateRows) -> tuple[jax.Array, jax.Array]:
    """x [T, *C] with taps [*C, W] (the last one is the token's own), plus bias [*C]; pool [N, *C, W - 1], oldest input first.

    Returns ([T, *C] float32, the pool).
    """
    x, taps = x.astype(jnp.float32), taps.astype(jnp.float32)
    num_tokens, kept = x.shape[0], taps.shape[-1] - 1
    if not kept:
        return x * taps[..., 0] + (0.0 if bias is None else bias.astype(jnp.float32)), pool
    states = jnp.moveaxis(rows.load(pool), -1, 1)  # [R, W - 1, *C]
    row = jnp.minimum(rows.token_rows, rows.num_rows - 1)
    offset = jnp.arange(num_tokens) - rows.q_starts[row]
    y = x * taps[..., -1]
    for back in range(1, kept + 1):
        earlier = jnp.concatenate([jnp.zeros_like(x[:back]), x])[:num_tokens]
        of_state = states[row, jnp.clip(kept + offset - back, 0, kept - 1)]
        y += jnp.where((offset >= back).reshape(-1, *(1,) * (x.ndim - 1)), earlier, of_state) * taps[..., -1 - back]
    y = y if bias is None else y + bias.astype(jnp.float32)

    # The last inputs of each row: of this step, or else of the state before.
    lens = rows.lens[:, None]
    place = jnp.arange(kept) - kept + lens  # [R, W - 1], counted from the row's first token
    of_step = x[jnp.clip(rows.q_starts[:-1, None] + place, 0, num_tokens - 1)]
    of_state = states[jnp.arange(rows.num_rows)[:, None], jnp.clip(place + kept, 0, kept - 1)]
    states = jnp.where((place >= 0).reshape(*place.shape, *(1,) * (x.ndim - 1)), of_step, of_state)
    return y, rows.store(pool, jnp.moveaxis(states, 1, -1))
