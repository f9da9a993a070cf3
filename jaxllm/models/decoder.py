"""The one decoder that every family shares: its spec says everything, its layers do everything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxllm.layers.attention import Attend, Attention, Where
from jaxllm.layers.delta_net import DeltaNet
from jaxllm.layers.embedding import Embedding, Head, project
from jaxllm.layers.layer_input import LayerInputGate, LayerInputs
from jaxllm.layers.mamba import Mamba
from jaxllm.layers.mamba2 import Mamba2
from jaxllm.layers.mla import MLA
from jaxllm.layers.mlp import MLP
from jaxllm.layers.moe import MoE
from jaxllm.layers.norm import Norm
from jaxllm.layers.param import param
from jaxllm.layers.relative_bias import RelativeBias
from jaxllm.layers.rope import rotation, temperature
from jaxllm.layers.short_conv import ShortConv
from jaxllm.ops.linear import linear
from jaxllm.ops.moe import RunExperts, run_experts
from jaxllm.ops.recurrent import StateRows
from jaxllm.specs import (
    AttentionSpec,
    BlockSpec,
    DecoderSpec,
    DeltaNetSpec,
    FeedForwardSpec,
    Mamba2Spec,
    MambaSpec,
    MixerSpec,
    MLASpec,
    MLPSpec,
    MoESpec,
    RecurrentSpec,
    ShortConvSpec,
)

MIXERS: dict[type[MixerSpec], Callable[..., Any]] = {AttentionSpec: Attention, MLASpec: MLA}
RECURRENT: dict[type[RecurrentSpec], Callable[..., Any]] = {
    MambaSpec: Mamba,
    Mamba2Spec: Mamba2,
    DeltaNetSpec: DeltaNet,
    ShortConvSpec: ShortConv,
}
FEED_FORWARDS: dict[type[FeedForwardSpec], Callable[..., Any]] = {MLPSpec: MLP, MoESpec: MoE}


class Block(nnx.Module):
    """A mixer, attention to an encoder and a feed-forward, each with its residual; the norms stand where the spec places them."""

    def __init__(self, spec: BlockSpec, width: int, dtype: DTypeLike):
        def norm(there: bool, *placements: str) -> Norm | None:
            return Norm(spec.norm, width, dtype, "embed") if there and spec.placement in placements else None

        self.spec = spec
        mixes, feeds = spec.mixer is not None or spec.recurrent is not None, spec.feed_forward is not None
        self.attention_norm = norm(mixes, "pre", "sandwich", "sandwich_mixer", "parallel", "parallel_shared")
        self.attention = MIXERS[type(spec.mixer)](spec.mixer, width, dtype) if spec.mixer else None
        self.recurrent = RECURRENT[type(spec.recurrent)](spec.recurrent, width, dtype) if spec.recurrent else None
        self.attention_post_norm = norm(mixes, "output", "sandwich", "sandwich_mixer", "post")
        self.cross_norm = norm(spec.cross is not None, "pre")
        self.cross = Attention(spec.cross, width, dtype) if spec.cross else None
        self.cross_post_norm = norm(spec.cross is not None, "post")
        self.mlp_norm = norm(feeds, "pre", "pre_mlp", "sandwich", "parallel")
        self.mlp = FEED_FORWARDS[type(spec.feed_forward)](spec.feed_forward, width, dtype) if spec.feed_forward else None
        self.mlp_post_norm = norm(feeds, "output", "sandwich", "sandwich_mixer", "post")
        self.layer_input = LayerInputGate(spec.layer_input, width, dtype) if spec.layer_input else None
        self.scalar = param((1,), (None,), dtype) if spec.scaled else None

    def __call__(
        self,
        x: jax.Array,
        where: Where,
        layer_input: jax.Array | None,
        caches: Sequence[Any],
        attend: Attend,
        rows: StateRows | None,
        experts: RunExperts,
    ) -> tuple[jax.Array, list[Any]]:
        """x [T, M], the layer's input [T, P] and its caches to ([T, M], caches)."""
        before = x if self.attention_norm is None else self.attention_norm(x)
        mixed, caches = self._mix(before, where, caches, attend, rows)
        if self.spec.placement.startswith("parallel") and mixed is not None and self.mlp is not None:
            x = self._add(x, mixed + self._feed_forward(before if self.mlp_norm is None else self.mlp_norm(x), experts), None)
        else:
            x = x if mixed is None else self._add(x, mixed, self.attention_post_norm)
            if self.cross is not None:
                y, caches[-1] = self.cross(x if self.cross_norm is None else self.cross_norm(x), where, caches[-1], attend)
                x = self._add(x, y, self.cross_post_norm)
            if self.mlp is not None:
                y = self._feed_forward(x if self.mlp_norm is None else self.mlp_norm(x), experts)
                x = self._add(x, y, self.mlp_post_norm)
        if self.layer_input is not None and layer_input is not None:
            x = self.layer_input(x, layer_input)
        return x if self.scalar is None else x * self.scalar[...], caches

    def _mix(
        self, x: jax.Array, where: Where, caches: Sequence[Any], attend: Attend, rows: StateRows | None
    ) -> tuple[jax.Array | None, list[Any]]:
        """The sum of attention and recurrent layer, where there are any."""
        caches, mixed = list(caches), None
        if self.attention is not None:
            mixed, caches[0] = self.attention(x, where, caches[0], attend)
        if self.recurrent is not None:
            own = 0 if self.attention is None else 1
            y, caches[own] = self.recurrent(x, caches[own], rows)
            mixed = y if mixed is None else mixed + y
        return mixed, caches

    def _feed_forward(self, x: jax.Array, experts: RunExperts) -> jax.Array:
        assert self.mlp is not None
        return self.mlp(x, experts) if isinstance(self.mlp, MoE) else self.mlp(x)

    def _add(self, x: jax.Array, y: jax.Array, norm: Norm | None) -> jax.Array:
        if self.spec.residual_scale != 1.0:
            y = y * jnp.asarray(self.spec.residual_scale, y.dtype)
        if norm is None:
            return x + y
        return norm(x + y) if self.spec.placement == "post" else x + norm(y)


class Decoder(nnx.Module):
    """Embedding, blocks, final norm and head. Knows nothing of batches, pages or meshes: `attend` and `experts` do."""

    def __init__(self, spec: DecoderSpec, dtype: DTypeLike):
        self.spec = spec
        self.embed = Embedding(
            spec.padded_vocab_size,
            spec.width,
            dtype,
            scale=spec.embedding_scale,
            positions=spec.learned_positions,
            position_offset=spec.position_offset,
            token_types=spec.token_types,
            table_width=spec.embedding_width,
            norm=spec.embedding_norm,
        )
        self.encoder = Decoder(spec.encoder, dtype) if spec.encoder else None
        if self.encoder is not None:
            self.encoder.embed.weight = self.embed.weight
        first = spec.blocks[0].mixer
        relative = first and first.attend.relative
        self.relative_bias = RelativeBias(relative, first.num_heads, dtype, causal=first.attend.causal) if first and relative else None
        inputs = spec.blocks[0].layer_input
        self.layer_inputs = LayerInputs(inputs, len(spec.blocks), spec.padded_vocab_size, spec.width, dtype) if inputs else None
        self.layers = nnx.List([Block(block, spec.width, dtype) for block in spec.blocks])
        self.final_norm = Norm(spec.final_norm, spec.width, dtype, "embed") if spec.final_norm else None
        self.head_projection = param((spec.embedding_width, spec.width), (None, "embed"), dtype) if spec.embedding_width else None
        self.head = None if spec.tied_head else Head(spec.padded_vocab_size, spec.embedding_width or spec.width, dtype)
        self.head_bias = param((spec.padded_vocab_size,), ("vocab",), dtype) if spec.head_bias else None

    def __call__(
        self,
        token_ids: jax.Array,
        positions: jax.Array,
        caches: Sequence[Any],
        attend: Attend,
        token_types: jax.Array | None = None,
        rows: StateRows | None = None,
        experts: RunExperts = run_experts,
    ) -> tuple[jax.Array, list[Any]]:
        """token_ids, positions and token_types [T] int32, the caches of the spec's `cache_layers`, and the rows of states where layers are
        recurrent, to (hidden [T, M] after the final norm, caches).
        """
        x = self.embed(token_ids, positions, token_types)
        layer_inputs = None if self.layer_inputs is None else self.layer_inputs(token_ids, x)
        places = self._places(positions)

        # Blocks of one spec differ in their arrays only: a jitted function traces and lowers them once instead of once a layer.
        @partial(jax.jit, static_argnums=0)
        def run(
            graph: nnx.GraphDef[Block], state: nnx.State, x: jax.Array, where: Where, layer_input: jax.Array | None, caches: list[Any]
        ) -> tuple[jax.Array, list[Any]]:
            return nnx.merge(graph, state)(x, where, layer_input, caches, attend, rows, experts)

        new_caches = list(caches)
        for i, (layer, where, of_layer) in enumerate(zip(self.layers, places, self.spec.cache_of_layers, strict=True)):
            layer_input = None if layer_inputs is None else layer_inputs[:, i]
            x, changed = run(*nnx.split(layer), x, where, layer_input, [new_caches[cache] for cache in of_layer])
            for cache, value in zip(of_layer, changed, strict=True):
                new_caches[cache] = value
        return x if self.final_norm is None else self.final_norm(x), new_caches

    def encode(self, token_ids: jax.Array, positions: jax.Array, attend: Attend) -> tuple[jax.Array, list[tuple[jax.Array, jax.Array]]]:
        """Whole inputs of the encoder, token_ids and positions [T] int32, to (hidden [T, M], the keys and values [T, K, D] that each layer
        reads of them); `attend` is the encoder's.
        """
        assert self.encoder is not None
        hidden, _ = self.encoder(token_ids, positions, [None] * len(self.encoder.layers), attend)
        return hidden, [layer.cross.keys_and_values(hidden) for layer in self.layers if layer.cross is not None]

    def _places(self, positions: jax.Array) -> list[Where]:
        """What positions mean to each layer; layers of one rope share its angles."""
        mixers = [block.mixer for block in self.spec.blocks]
        rotations = {mixer.rope: rotation(positions, mixer.rope) for mixer in mixers if mixer and mixer.rope}
        factors = {mixer.temperature: temperature(positions, mixer.temperature) for mixer in mixers if mixer and mixer.temperature}
        bias = None if self.relative_bias is None else self.relative_bias()
        return [
            Where(
                rotations[mixer.rope] if mixer and mixer.rope else None,
                factors[mixer.temperature] if mixer and mixer.temperature else None,
                bias,
            )
            for mixer in mixers
        ]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [N, M] to float32 logits [N, V]."""
        spec = self.spec
        if self.head_projection is not None:
            hidden = linear(hidden, self.head_projection[...])
        return project(
            hidden,
            (self.embed if self.head is None else self.head).weight[...],
            vocab_size=spec.vocab_size,
            softcap=spec.final_softcap,
            bias=None if self.head_bias is None else self.head_bias[...],
            scale=spec.logit_scale,
        )
