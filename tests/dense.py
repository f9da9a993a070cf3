"""A plain attention over whole sequences, to run a decoder without the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.models.build import ModelDef
from jaxllm.ops.recurrent import StateRows
from jaxllm.specs import AttendSpec, StateLayer


def dense_attend(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    cache: Any,
    spec: AttendSpec,
    sinks: jax.Array | None = None,
    slopes: jax.Array | None = None,
) -> tuple[jax.Array, Any]:
    """Causal attention of one sequence in float32: q [T, H, D], k and v [T, K, D], which are the cache for layers that have none."""
    k, v = cache = cache if k is None else (k, v)
    tokens, heads, dim = q.shape
    kv_heads = k.shape[1]
    values = k[..., : spec.latent] if v is None else v
    grouped = q.reshape(tokens, kv_heads, heads // kv_heads, dim).astype(jnp.float32)
    scores = jnp.einsum("qkgd,skd->kgqs", grouped, k.astype(jnp.float32)) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * jnp.tanh(scores / spec.softcap)
    position = jnp.arange(tokens)
    if slopes is not None or spec.alibi is not None:
        slopes = jnp.asarray(spec.alibi) if slopes is None else slopes
        scores += slopes.reshape(kv_heads, -1, 1, 1) * (position[None, :] - position[:, None])
    visible = position[None, :] <= position[:, None]
    if spec.window is not None and spec.chunked:
        visible &= position[None, :] // spec.window == position[:, None] // spec.window
    elif spec.window is not None:
        visible &= position[None, :] > position[:, None] - spec.window
    scores = jnp.where(visible, scores, -jnp.inf)
    if sinks is not None:
        column = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(kv_heads, -1, 1, 1), (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, column], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., :tokens]
    out = jnp.einsum("kgqs,skd->qkgd", weights, values.astype(jnp.float32))
    return out.reshape(tokens, heads, -1).astype(q.dtype), cache


def one_row(num_tokens: int) -> StateRows:
    """The rows of a step that computes one whole sequence."""
    none, one = jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.int32)
    return StateRows(
        q_starts=jnp.array([0, num_tokens], jnp.int32),
        token_rows=jnp.zeros(num_tokens, jnp.int32),
        num_decodes=jnp.int32(0),
        fresh=one == 1,
        read=none,
        write=one,
    )


def empty_caches(model: ModelDef) -> list[Any]:
    """Nothing for attention, and pages for the states of one sequence."""
    layers = model.cache_layers
    return [tuple(jnp.zeros((2, *s)) for s in layer.shapes) if isinstance(layer, StateLayer) else None for layer in layers]


def run_dense(model: ModelDef, params: Sequence[jax.Array], token_ids: Sequence[int] | np.ndarray) -> jax.Array:
    """Logits [T, V] of every position of one sequence."""

    @jax.jit
    def forward(params: Sequence[jax.Array], ids: jax.Array) -> jax.Array:
        decoder = model.bind(params)
        positions = jnp.arange(ids.shape[0], dtype=jnp.int32)
        hidden, _ = decoder(ids, positions, empty_caches(model), dense_attend, rows=one_row(ids.shape[0]))
        return decoder.logits(hidden)

    return forward(params, jnp.asarray(token_ids, jnp.int32))
