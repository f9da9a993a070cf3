"""Token embeddings, learned positions and the output head."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxllm.layers.param import param
from jaxllm.ops.linear import contract


class Embedding(nnx.Module):
    """Rows of `weight` [V, M] by token id, scaled, plus rows of `positions` [P, M] by position."""

    def __init__(self, vocab_size: int, width: int, dtype: DTypeLike, *, scale: float | None, positions: int | None):
        self.scale = scale
        self.weight = param((vocab_size, width), ("vocab", "embed"), dtype)
        self.positions = param((positions, width), (None, "embed"), dtype) if positions else None

    def __call__(self, token_ids: jax.Array, positions: jax.Array) -> jax.Array:
        """token_ids [T] and positions [T], both int32 and in range, to [T, M]."""
        x = jnp.take(self.weight[...], token_ids, axis=0, mode="clip")
        if self.scale is not None:
            # The scale rounded to the parameters' dtype is what the models were trained with.
            x = x * jnp.asarray(self.scale, x.dtype)
        if self.positions is not None:
            x = x + jnp.take(self.positions[...], positions, axis=0, mode="clip")
        return x


class Head(nnx.Module):
    """An output projection of its own: `weight` [V, M]."""

    def __init__(self, vocab_size: int, width: int, dtype: DTypeLike):
        self.weight = param((vocab_size, width), ("vocab", "embed"), dtype)


def project(hidden: jax.Array, weight: jax.Array, *, vocab_size: int, softcap: float | None) -> jax.Array:
    """hidden [N, M] times weight [V', M] to float32 logits [N, V], without the padded rows, bounded by `softcap`."""
    logits = contract(hidden, weight, 1, preferred_element_type=jnp.float32)
    if logits.shape[-1] != vocab_size:
        logits = logits[:, :vocab_size]
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)
