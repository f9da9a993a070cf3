"""The one decoder that every family shares: its spec says everything, its layers do everything."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
from flax import nnx
from jax.typing import DTypeLike

from jaxllm.layers.attention import Attend, Attention
from jaxllm.layers.embedding import Embedding, Head, project
from jaxllm.layers.mlp import MLP
from jaxllm.layers.norm import Norm
from jaxllm.layers.rope import Rotation, rotation
from jaxllm.specs import BlockSpec, DecoderSpec


class Block(nnx.Module):
    """A mixer and a feed-forward, each with its residual; the norms stand where the spec places them."""

    def __init__(self, spec: BlockSpec, width: int, dtype: DTypeLike):
        after = spec.placement == "sandwich"
        self.attention_norm = Norm(spec.norm, width, dtype, "embed")
        self.attention = Attention(spec.mixer, width, dtype)
        self.attention_post_norm = Norm(spec.norm, width, dtype, "embed") if after else None
        self.mlp_norm = Norm(spec.norm, width, dtype, "embed")
        self.mlp = MLP(spec.feed_forward, width, dtype)
        self.mlp_post_norm = Norm(spec.norm, width, dtype, "embed") if after else None

    def __call__(self, x: jax.Array, rotation: Rotation | None, cache: Any, attend: Attend) -> tuple[jax.Array, Any]:
        """x [T, M] and the layer's cache to ([T, M], cache)."""
        y, cache = self.attention(self.attention_norm(x), rotation, cache, attend)
        x = x + (y if self.attention_post_norm is None else self.attention_post_norm(y))
        y = self.mlp(self.mlp_norm(x))
        return x + (y if self.mlp_post_norm is None else self.mlp_post_norm(y)), cache


class Decoder(nnx.Module):
    """Embedding, blocks, final norm and head. Knows nothing of batches, pages or meshes: `attend` does."""

    def __init__(self, spec: DecoderSpec, dtype: DTypeLike):
        self.spec = spec
        self.embed = Embedding(spec.padded_vocab_size, spec.width, dtype, scale=spec.embedding_scale, positions=spec.learned_positions)
        self.layers = nnx.List([Block(block, spec.width, dtype) for block in spec.blocks])
        self.final_norm = Norm(spec.final_norm, spec.width, dtype, "embed")
        self.head = None if spec.tied_head else Head(spec.padded_vocab_size, spec.width, dtype)

    def __call__(self, token_ids: jax.Array, positions: jax.Array, caches: Sequence[Any], attend: Attend) -> tuple[jax.Array, list[Any]]:
        """token_ids [T] and positions [T] int32, one cache a layer, to (hidden [T, M] after the final norm, caches)."""
        x = self.embed(token_ids, positions)
        ropes = [block.mixer.rope for block in self.spec.blocks]
        rotations = {rope: None if rope is None else rotation(positions, rope) for rope in dict.fromkeys(ropes)}

        # Blocks of one spec differ in their arrays only: a jitted function traces and lowers them once instead of once a layer.
        @partial(jax.jit, static_argnums=0)
        def run(graph: nnx.GraphDef[Block], state: nnx.State, x: jax.Array, rotation: Rotation | None, cache: Any) -> tuple[jax.Array, Any]:
            return nnx.merge(graph, state)(x, rotation, cache, attend)

        new_caches = []
        for layer, rope, cache in zip(self.layers, ropes, caches, strict=True):
            x, cache = run(*nnx.split(layer), x, rotations[rope], cache)
            new_caches.append(cache)
        return self.final_norm(x), new_caches

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [N, M] to float32 logits [N, V]."""
        weight = self.embed.weight if self.head is None else self.head.weight
        return project(hidden, weight[...], vocab_size=self.spec.vocab_size, softcap=self.spec.final_softcap)
