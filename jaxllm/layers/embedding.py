"""Token embeddings, learned positions and the output head."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxllm.layers.norm import Norm
from jaxllm.layers.param import param
from jaxllm.ops.linear import contract, linear
from jaxllm.specs import NormSpec


class Embedding(nnx.Module):
    """Rows of `weight` [V, M] by token id, scaled, plus rows of `positions` [P, M] by position + `position_offset` and of `types` by token
    type, normalised.

    Where the rows have another width than the model, `weight` is [V, table_width] and `projection` [M, table_width].
    """

    def __init__(
        self,
        vocab_size: int,
        width: int,
        dtype: DTypeLike,
        *,
        scale: float | None = None,
        positions: int | None = None,
        position_offset: int = 0,
        token_types: int = 0,
        table_width: int | None = None,
        norm: NormSpec | None = None,
    ):
        self.scale = scale
        self.position_offset = position_offset
        self.weight = param((vocab_size, table_width or width), ("vocab", "embed"), dtype)
        self.projection = param((width, table_width), ("embed", None), dtype) if table_width else None
        self.positions = param((positions + position_offset, width), (None, "embed"), dtype) if positions else None
        self.types = param((token_types, width), (None, "embed"), dtype) if token_types else None
        self.norm = Norm(norm, width, dtype, "embed") if norm else None

    def __call__(self, token_ids: jax.Array, positions: jax.Array, token_types: jax.Array | None = None) -> jax.Array:
        """token_ids, positions and token_types (None: all 0) [T], int32 and in range, to [T, M]."""
        x = take_rows(self.weight[...], token_ids, self.scale)
        if self.projection is not None:
            x = linear(x, self.projection[...])
        if self.positions is not None:
            x = x + take_rows(self.positions[...], positions + self.position_offset)
        if self.types is not None:
            x = x + (self.types[...][0] if token_types is None else take_rows(self.types[...], token_types))
        return x if self.norm is None else self.norm(x)


def take_rows(table: jax.Array, rows: jax.Array, scale: float | None = None) -> jax.Array:
    """Rows [T] of table [N, W], times `scale`."""
    x = jnp.take(table, rows, axis=0, mode="clip")
    # The scale rounded to the parameters' dtype is what the models were trained with.
    return x if scale is None else x * jnp.asarray(scale, x.dtype)


class Head(nnx.Module):
    """An output projection of its own: `weight` [V, M]."""

    def __init__(self, vocab_size: int, width: int, dtype: DTypeLike):
        self.weight = param((vocab_size, width), ("vocab", "embed"), dtype)


def project(
    hidden: jax.Array,
    weight: jax.Array,
    *,
    vocab_size: int,
    softcap: float | None = None,
    bias: jax.Array | None = None,
    scale: float = 1.0,
) -> jax.Array:
    """hidden [N, M] times weight [V', M] plus bias [V'] to float32 logits [N, V], without the padded rows, scaled, bounded by `softcap`."""
    logits = contract(hidden, weight, preferred_element_type=jnp.float32)
    if bias is not None:
        logits = logits + bias.astype(jnp.float32)
    if logits.shape[-1] != vocab_size:
        logits = logits[:, :vocab_size]
    if scale != 1.0:
        logits = logits * scale
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)
