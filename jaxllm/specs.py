"""A model as data: small frozen specs, each read by one layer. No jax here.

A decoder is an embedding, a tuple of `BlockSpec`s and a head. Family files (`models/*.py`) turn a Hugging Face config into these.
Sizes are in elements; dims are those of `core_types`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

NormKind = Literal["rms", "rms_plus_one", "layer"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
Placement = Literal["pre", "sandwich"]


@dataclass(frozen=True)
class AttendSpec:
    """What the attention operation itself must know of a layer.

    `window` counts the positions that a query sees, itself included; None sees everything before it. Where `chunked`, sequences are cut
    into chunks of `window` positions, and a query sees those of its own chunk. `softcap` bounds the scores: softcap * tanh(score /
    softcap). `latent` is the number of leading dims of the one key head that are its value as well (multi-head latent attention).
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    chunked: bool = False
    latent: int | None = None


@dataclass(frozen=True)
class CacheLayer:
    """What a layer keeps of each position: `num_kv_heads` keys of `head_dim`, and as many values unless they are part of the keys."""

    num_kv_heads: int
    head_dim: int
    attend: AttendSpec

    @property
    def window(self) -> int | None:
        """Positions that a query sees at most, and that are therefore kept."""
        return self.attend.window

    @property
    def is_split(self) -> bool:
        """Whether devices share the heads; a latent is whole on each."""
        return self.attend.latent is None


@dataclass(frozen=True)
class NormSpec:
    """Root-mean-square norm (`rms`), the same with weight 1 + w (`rms_plus_one`, Gemma), or layer norm with bias (`layer`)."""

    kind: NormKind
    eps: float


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding of halves: angle = position * frequency.

    `frequencies` has half as many entries as dimensions are rotated (the first ones of each head). `magnitude` multiplies cosine and
    sine (yarn, longrope).
    """

    frequencies: tuple[float, ...]
    magnitude: float = 1.0


@dataclass(frozen=True)
class AttentionSpec:
    """Grouped-query attention; query head h reads KV head h // (num_heads / num_kv_heads).

    `sinks`: each head has a learned score that takes part in the softmax and has no value.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    attend: AttendSpec
    rope: RopeSpec | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: NormSpec | None = None
    sinks: bool = False

    @property
    def cache(self) -> CacheLayer:
        return CacheLayer(self.num_kv_heads, self.head_dim, self.attend)


@dataclass(frozen=True)
class MLPSpec:
    """down(act(gate(x)) * up(x)), or down(act(up(x))) where not gated.

    Gate and up are stored in `groups` equal parts, each with its share of both, so that every shard holds whole parts.
    """

    width: int
    activation: Activation
    gated: bool = True
    bias: bool = False
    groups: int = 1


@dataclass(frozen=True)
class BlockSpec:
    """Mixer and feed-forward with a residual around each; norms before each (`pre`), or before and after each (`sandwich`)."""

    mixer: AttentionSpec
    feed_forward: MLPSpec
    norm: NormSpec
    placement: Placement = "pre"


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder-only language model.

    `vocab_size` is that of the tokens; `padded_vocab_size` the rows of embedding and head (more where shards must be equal).
    `learned_positions` is the number of learned position embeddings, None without. `embedding_scale` multiplies embeddings.
    """

    width: int
    vocab_size: int
    blocks: tuple[BlockSpec, ...]
    final_norm: NormSpec
    tied_head: bool
    max_positions: int
    padded_vocab_size: int = 0
    learned_positions: int | None = None
    embedding_scale: float | None = None
    final_softcap: float | None = None

    def __post_init__(self) -> None:
        if self.padded_vocab_size == 0:
            object.__setattr__(self, "padded_vocab_size", self.vocab_size)
