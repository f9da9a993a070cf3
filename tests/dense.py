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
    bias: jax.Array | None = None,
) -> tuple[jax.Array, Any]:
    """Attention of one sequence in float32: q [T, H, D], k and v [T, K, D], which are the cache for layers that have none."""
    k, v = cache = cache if k is None else (k, v)
    tokens, heads, dim = q.shape
    kv_heads = k.shape[1]
    values = k[..., : spec.latent] if v is None else v
    grouped = q.reshape(tokens, kv_heads, heads // kv_heads, dim).astype(jnp.float32)
    scores = jnp.einsum("qkgd,skd->kgqs", grouped, k.astype(jnp.float32)) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * jnp.tanh(scores / spec.softcap)
    position = jnp.arange(tokens)
    ahead = jnp.arange(len(k))[None, :] - position[:, None]
    bias = jnp.asarray(spec.alibi) if bias is None and spec.alibi is not None else bias
    if bias is not None:
        most = bias.shape[-1] // 2
        added = bias.reshape(-1, 1, 1) * ahead if bias.ndim == 1 else bias[:, jnp.clip(ahead, -most, most) + most]
        scores += added.reshape(scores.shape)
    visible = (ahead <= 0) | (not spec.causal)
    if not spec.causal:
        pass
    elif spec.window is not None and spec.chunked:
        visible &= position[None, :] // spec.window == position[:, None] // spec.window
    elif spec.window is not None:
        visible &= position[None, :] > position[:, None] - spec.window
    scores = jnp.where(visible, scores, -jnp.inf)
    if sinks is not None:
        column = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(kv_heads, -1, 1, 1), (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, column], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : len(k)]
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


def all_logits(
    model: ModelDef, params: Sequence[jax.Array], ids: jax.Array, encoder_ids: jax.Array | None, attend: Any, **options: Any
) -> jax.Array:
    """Logits [T, V] of every position of one sequence, behind what an encoder makes of its input."""
    decoder, caches = model.bind(params), empty_caches(model)
    if encoder_ids is not None:
        _, kept = decoder.encode(encoder_ids, jnp.arange(len(encoder_ids)), attend)
        layers = [i for i, layer in enumerate(model.cache_layers) if not layer.attend.causal]
        for layer, keys_and_values in zip(layers, kept, strict=True):
            caches[layer] = keys_and_values
    hidden, _ = decoder(ids, jnp.arange(len(ids)), caches, attend, rows=one_row(len(ids)), **options)
    return decoder.logits(hidden)


def run_dense(
    model: ModelDef,
    params: Sequence[jax.Array],
    token_ids: Sequence[int] | np.ndarray,
    encoder_ids: Sequence[int] | np.ndarray | None = None,
) -> jax.Array:
    """Logits [T, V] of every position of one sequence, behind what an encoder makes of its input."""
    encoder_ids = None if encoder_ids is None else jnp.asarray(encoder_ids, jnp.int32)
    forward = jax.jit(lambda params, ids, encoder_ids: all_logits(model, params, ids, encoder_ids, dense_attend))
    return forward(params, jnp.asarray(token_ids, jnp.int32), encoder_ids)
