"""Inputs that each layer gets beside the hidden state: one vector a token and layer (Gemma 3n and 4)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxllm.layers.embedding import take_rows
from jaxllm.layers.mlp import ACTIVATIONS
from jaxllm.layers.norm import Norm
from jaxllm.layers.param import param
from jaxllm.ops.linear import linear
from jaxllm.specs import LayerInputSpec


class LayerInputs(nnx.Module):
    """A table `weight` [V, L * P] for L layers, and `projection` [L * P, M] of the embedded token, normalised by layer."""

    def __init__(self, spec: LayerInputSpec, num_layers: int, vocab_size: int, width: int, dtype: DTypeLike):
        self.spec = spec
        self.weight = param((vocab_size, num_layers * spec.width), ("vocab", None), dtype)
        self.projection = param((num_layers * spec.width, width), (None, "embed"), dtype)
        self.norm = Norm(spec.norm, spec.width, dtype)

    def __call__(self, token_ids: jax.Array, embedded: jax.Array) -> jax.Array:
        """token_ids [T] and their embeddings [T, M] to [T, L, P]."""
        own = take_rows(self.weight[...], token_ids, self.spec.width**0.5).reshape(len(token_ids), -1, self.spec.width)
        context = linear(embedded, self.projection[...]) * jnp.asarray(embedded.shape[-1] ** -0.5, embedded.dtype)
        return (self.norm(context.reshape(own.shape)) + own) * jnp.asarray(2.0**-0.5, own.dtype)


class LayerInputGate(nnx.Module):
    """x plus the norm of out(act(gate(x)) * input): `gate` [P, M], `out` [M, P]. Small enough that every device holds all of it."""

    def __init__(self, spec: LayerInputSpec, width: int, dtype: DTypeLike):
        self.spec = spec
        self.gate = param((spec.width, width), (None, "embed"), dtype)
        self.out = param((width, spec.width), ("embed", None), dtype)
        self.norm = Norm(spec.norm, width, dtype, "embed")

    def __call__(self, x: jax.Array, layer_input: jax.Array) -> jax.Array:
        """x [T, M] and the layer's input [T, P] to [T, M]."""
        gated = ACTIVATIONS[self.spec.activation](linear(x, self.gate[...])) * layer_input
        return x + self.norm(linear(gated, self.out[...]))
