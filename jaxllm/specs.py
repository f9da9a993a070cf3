"""A model as data: small frozen specs, each read by one layer. No jax here.

A decoder is an embedding, a tuple of `BlockSpec`s and a head. Family files (`models/*.py`) turn a Hugging Face config into these.
Sizes are in elements; dims are those of `core_types`. A mixer or feed-forward spec also says how it is shared by devices: `divides`
whether n of them can have equal parts, `sharded` the spec with sizes that they can share, `sizes` what to say where they cannot. A mixer's
`cache` is what it keeps of each position, None where it reads what an earlier layer keeps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

NormKind = Literal["rms", "rms_wide", "rms_plus_one", "layer", "layer_plus_one"]
Activation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu_squared", "xielu"]
Placement = Literal["pre", "pre_mlp", "output", "sandwich", "sandwich_mixer", "post", "parallel", "parallel_shared"]


@dataclass(frozen=True)
class RelativeSpec:
    """A learned bias of each head for how far a key lies from its query (T5), in buckets of growing size up to `max_distance`."""

    num_buckets: int
    max_distance: int


@dataclass(frozen=True)
class AttendSpec:
    """What the attention operation itself must know of a layer.

    `window` counts the positions that a query sees, itself included; None sees everything before it. Where `chunked`, sequences are cut
    into chunks of `window` positions, and a query sees those of its own chunk. `softcap` bounds the scores: softcap * tanh(score /
    softcap). `latent` is the number of leading dims of the one key head that are its value as well (multi-head latent attention).
    `alibi` has a slope for each query head: a score loses slope * distance (Press et al., 2021, arXiv:2108.12409). `relative` is a
    learned bias, whose values all layers share. Where not `causal`, a query sees as far ahead as back.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    chunked: bool = False
    latent: int | None = None
    alibi: tuple[float, ...] | None = None
    relative: RelativeSpec | None = None
    causal: bool = True


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
    """Root-mean-square norm or layer norm.

    `rms` rounds to the activations' dtype before it multiplies by the weight, `rms_wide` after; `rms_plus_one` (Gemma) and
    `layer_plus_one` (Nemotron) store the weight as its difference from one. `bias` matters to layer norms only.
    """

    kind: NormKind
    eps: float
    weight: bool = True
    bias: bool = True


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding: angle = position * frequency.

    `frequencies` has half as many entries as dimensions are rotated (the first ones of each head). The dimensions of one angle are half
    the rotated ones apart, or neighbours where `interleaved`. `magnitude` multiplies cosine and sine (yarn, longrope).
    """

    frequencies: tuple[float, ...]
    magnitude: float = 1.0
    interleaved: bool = False


@dataclass(frozen=True)
class TemperatureSpec:
    """Queries grow with their position p (Llama 4, Ministral 3): 1 + beta * log(1 + floor((p + offset) / period))."""

    beta: float
    period: float
    offset: float = 0.0


@dataclass(frozen=True)
class AttentionSpec:
    """Grouped-query attention; query head h reads KV head h // (num_heads / num_kv_heads).

    `clip` bounds queries, keys and values before rotation. `qk_norm` normalises queries and keys before they are rotated (or
    `qk_norm_after_rope`): each head with one weight for all (`head`), each head with a weight of its own (`each`), or all heads as one
    vector (`all`).
    `v_norm` normalises heads of values. `key_is_value`: the values are the projected keys, before their norm and rotation.
    `cache_of` names an earlier layer whose keys and values this one reads instead of having its own. `sinks`: each head has a learned
    score that takes part in the softmax and has no value. `gated`: the sigmoid of a projection multiplies what attention gives.
    `out_scale` multiplies the result. `cross`: keys and values are those of the whole input of an encoder, which `window` bounds.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    attend: AttendSpec
    rope: RopeSpec | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    clip: float | None = None
    qk_norm: NormSpec | None = None
    qk_norm_over: Literal["head", "each", "all"] = "head"
    qk_norm_after_rope: bool = False
    v_norm: NormSpec | None = None
    temperature: TemperatureSpec | None = None
    key_is_value: bool = False
    cache_of: int | None = None
    sinks: bool = False
    gated: bool = False
    out_scale: float = 1.0
    cross: bool = False

    @property
    def cache(self) -> CacheLayer | None:
        return CacheLayer(self.num_kv_heads, self.head_dim, self.attend) if self.cache_of is None else None

    @property
    def sizes(self) -> str:
        return f"{self.num_heads} attention heads, {self.num_kv_heads} KV heads"

    def divides(self, shards: int) -> bool:
        return self.num_heads % shards == 0 and (self.num_kv_heads % shards == 0 or shards % self.num_kv_heads == 0)

    def sharded(self, shards: int) -> AttentionSpec:
        """KV heads are replicated where there are fewer than shards."""
        return replace(self, num_kv_heads=max(self.num_kv_heads, shards))


@dataclass(frozen=True)
class MLASpec:
    """Multi-head latent attention: heads of `nope_dim` unrotated and `rope_dim` rotated dims, values of `value_dim`.

    Queries come out of a latent of `q_latent_dim` of their own where that is given; `norm` is that of both latents. The rotated key is
    the same for all heads.
    """

    num_heads: int
    latent_dim: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    attend: AttendSpec
    rope: RopeSpec
    norm: NormSpec
    q_latent_dim: int | None = None
    temperature: TemperatureSpec | None = None
    cache_of: None = None

    @property
    def cache(self) -> CacheLayer:
        return CacheLayer(1, self.latent_dim + self.rope_dim, self.attend)

    @property
    def sizes(self) -> str:
        return f"{self.num_heads} attention heads"

    def divides(self, shards: int) -> bool:
        return self.num_heads % shards == 0

    def sharded(self, shards: int) -> MLASpec:
        """The latent has one head, which every shard has."""
        return self


@dataclass(frozen=True)
class MLPSpec:
    """down(act(gate(x)) * up(x)), or down(act(up(x))) where not gated; `gate_scale` multiplies gate(x), `out_scale` the result.

    `limit` bounds the gate from above and up on both sides, and adds one to up (gpt-oss). Gate and up are stored in `groups` equal parts,
    each with its share of both, so that every shard holds whole parts.
    """

    width: int
    activation: Activation
    gated: bool = True
    bias: bool = False
    gate_scale: float = 1.0
    out_scale: float = 1.0
    limit: float | None = None
    groups: int = 1

    @property
    def sizes(self) -> str:
        return f"MLP width {self.width}"

    def divides(self, shards: int) -> bool:
        return self.width % shards == 0

    def sharded(self, shards: int) -> MLPSpec:
        return replace(self, groups=shards)


# What fused tensors of a recurrent layer hold for each of its `num_groups` groups, in the order of the checkpoint: how many rows, and
# whether groups may be copies.
GroupedRows = dict[str, tuple[tuple[int, bool], ...]]


@dataclass(frozen=True)
class StateLayer:
    """What a recurrent layer keeps of a sequence, whatever its length: float32 arrays of these shapes. Devices share their first axes."""

    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class MambaSpec:
    """A selective state space (Mamba): `inner` channels with a state of `state_size` each, behind a convolution of `conv_width`.

    `rank` is that of the step sizes' projection; `inner_norm` normalises step sizes, inputs and outputs of the state (Jamba).
    """

    inner: int
    state_size: int
    conv_width: int
    rank: int
    activation: Activation
    bias: bool = False
    conv_bias: bool = True
    inner_norm: NormSpec | None = None

    @property
    def cache(self) -> StateLayer:
        return StateLayer(((self.inner, self.conv_width - 1), (self.inner, self.state_size)))

    @property
    def num_groups(self) -> int:
        return self.inner

    @property
    def rows(self) -> GroupedRows:
        return {"projection": ((1, False),) * 2}

    @property
    def sizes(self) -> str:
        return f"state space of {self.inner} channels"

    def divides(self, shards: int) -> bool:
        return self.inner % shards == 0

    def sharded(self, shards: int) -> MambaSpec:
        return self


@dataclass(frozen=True)
class Mamba2Spec:
    """State space duality (Mamba 2): heads of `head_dim` with states of `state_size`; the heads of a group share what reads and writes it.

    `dt_limits` bound the step sizes. `norm` normalises the output, as a whole or (`norm_each`) group by group, after the gate multiplies it
    or (`norm_first`) before. `scales` multiply gate, values, inputs, outputs and step sizes as projected, `out_scale` the result.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    conv_width: int
    activation: Activation
    bias: bool = False
    conv_bias: bool = True
    dt_limits: tuple[float, float] = (0.0, float("inf"))
    norm: NormSpec | None = None
    norm_each: bool = False
    norm_first: bool = False
    scales: tuple[float, float, float, float, float] | None = None
    out_scale: float = 1.0

    @property
    def group_dim(self) -> int:
        """Values of one token in a group."""
        return self.num_heads // self.num_groups * self.head_dim

    @property
    def cache(self) -> StateLayer:
        conv = self.group_dim + 2 * self.state_size
        state = (self.num_groups, self.num_heads // self.num_groups, self.head_dim, self.state_size)
        return StateLayer(((self.num_groups, conv, self.conv_width - 1), state))

    @property
    def rows(self) -> GroupedRows:
        conv = ((self.group_dim, False), (self.state_size, True), (self.state_size, True))
        return {"conv": conv, "projection": ((self.group_dim, False), *conv, (self.num_heads // self.num_groups, False))}

    @property
    def sizes(self) -> str:
        return f"{self.num_heads} state heads in {self.num_groups} groups"

    def divides(self, shards: int) -> bool:
        copies = not self.norm_each and shards % self.num_groups == 0
        return self.num_heads % shards == 0 and (self.num_groups % shards == 0 or copies)

    def sharded(self, shards: int) -> Mamba2Spec:
        """Groups are replicated where there are fewer than shards."""
        return replace(self, num_groups=max(self.num_groups, shards))


@dataclass(frozen=True)
class DeltaNetSpec:
    """A gated delta net: `num_heads` value heads share `num_groups` heads of queries and keys; behind a convolution of `conv_width`.

    `norm` normalises each value head of the output, before the gate multiplies it.
    """

    num_heads: int
    num_groups: int
    key_dim: int
    value_dim: int
    conv_width: int
    activation: Activation
    norm: NormSpec

    @property
    def group_dim(self) -> int:
        """Values of one token in a group."""
        return self.num_heads // self.num_groups * self.value_dim

    @property
    def cache(self) -> StateLayer:
        state = (self.num_groups, self.num_heads // self.num_groups, self.key_dim, self.value_dim)
        return StateLayer(((self.num_groups, 2 * self.key_dim + self.group_dim, self.conv_width - 1), state))

    @property
    def rows(self) -> GroupedRows:
        conv = ((self.key_dim, False), (self.key_dim, False), (self.group_dim, False))
        return {"conv": conv, "projection": (*conv, (self.group_dim, False))}

    @property
    def sizes(self) -> str:
        return f"{self.num_groups} groups of {self.num_heads} delta net heads"

    def divides(self, shards: int) -> bool:
        return self.num_groups % shards == 0

    def sharded(self, shards: int) -> DeltaNetSpec:
        return self


@dataclass(frozen=True)
class ShortConvSpec:
    """A gated convolution (LFM2): out(c * conv(b * x)) for projections b, c, x of `channels` each."""

    channels: int
    conv_width: int
    bias: bool = False

    @property
    def cache(self) -> StateLayer:
        return StateLayer(((self.channels, self.conv_width - 1),))

    @property
    def num_groups(self) -> int:
        return self.channels

    @property
    def rows(self) -> GroupedRows:
        return {"projection": ((1, False),) * 3}

    @property
    def sizes(self) -> str:
        return f"convolution of {self.channels} channels"

    def divides(self, shards: int) -> bool:
        return self.channels % shards == 0

    def sharded(self, shards: int) -> ShortConvSpec:
        return self


RecurrentSpec = MambaSpec | Mamba2Spec | DeltaNetSpec | ShortConvSpec


@dataclass(frozen=True)
class LayerInputSpec:
    """Each layer gets a vector of its own for each token (Gemma 3n and 4): a second embedding table of `width` columns a layer, mixed
    with a projection of the embedded token. The layer gates it by its hidden state, projects, normalises and adds it.
    """

    width: int
    activation: Activation
    norm: NormSpec


@dataclass(frozen=True)
class RouterSpec:
    """How a token chooses `top_k` of the experts, and what each of them counts.

    Each expert has a score: a softmax over all, or a sigmoid of its own. Experts with the highest scores are chosen, those plus a learned
    `correction` where there is one, which does not count in the weights. With `groups`, only experts of the `top_groups` best groups
    are eligible; a group is as good as the sum of its `group_top` best. The weights are the scores of the chosen, `normalised` to a sum
    of one (a sum below `least_sum` counts as that), times `scale`. `sparsemixer` (Phi) has a rule of its own, with `jitter` as the
    distance within which experts compete. `bias`: of the router's projection. `expert_scale`: a learned factor of each expert's weight.
    """

    num_experts: int
    top_k: int
    scores: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    normalised: bool = False
    correction: bool = False
    bias: bool = False
    groups: int = 1
    top_groups: int = 1
    group_top: int = 1
    scale: float = 1.0
    least_sum: float = 1e-20
    jitter: float = 0.0
    expert_scale: bool = False


@dataclass(frozen=True)
class MoESpec:
    """Routed experts of one shape, and beside them one that every token goes to (`shared`), behind a sigmoid gate where `shared_gate`.

    `weigh_inputs`: a routing weight multiplies what goes into its expert, not what comes out (Llama 4). `norm`, where given, is that of
    the router's inputs, which are divided by the root of their width besides, and of what goes into the routed experts and into the
    shared one and what comes out of each (Gemma 4).
    """

    router: RouterSpec
    expert: MLPSpec
    shared: MLPSpec | None = None
    shared_gate: bool = False
    weigh_inputs: bool = False
    norm: NormSpec | None = None

    @property
    def width(self) -> int:
        """Hidden values of a token."""
        return self.router.top_k * self.expert.width + (self.shared.width if self.shared else 0)

    @property
    def sizes(self) -> str:
        return f"expert width {self.expert.width}" + (f", shared expert width {self.shared.width}" if self.shared else "")

    def divides(self, shards: int) -> bool:
        return self.expert.divides(shards) and (self.shared is None or self.shared.divides(shards))

    def sharded(self, shards: int) -> MoESpec:
        return replace(self, expert=self.expert.sharded(shards), shared=self.shared and self.shared.sharded(shards))


MixerSpec = AttentionSpec | MLASpec
FeedForwardSpec = MLPSpec | MoESpec


@dataclass(frozen=True)
class BlockSpec:
    """Mixer and feed-forward with a residual around each; `placement` says where the norms n stand around such a part f.

    `pre`: x + f(n(x)). `pre_mlp`: the same, but for the mixer x + f(x). `output`: x + n(f(x)). `sandwich`: x + n(f(n(x))).
    `sandwich_mixer`: the same, but for the feed-forward x + n(f(x)). `post`: n(x + f(x)). `parallel`: x + f(n(x)) + g(n'(x)) for mixer f
    and feed-forward g; `parallel_shared`: with one norm for both.
    `residual_scale` multiplies f(...) before it is added; `scaled`: a learned scalar multiplies the whole block's result.

    A `recurrent` layer mixes instead of attention, or beside it: then f is their sum. Either half of a block may be missing. Attention to
    an encoder (`cross`) stands between the two, with the same norms.
    """

    mixer: MixerSpec | None
    feed_forward: FeedForwardSpec | None
    norm: NormSpec
    placement: Placement = "pre"
    residual_scale: float = 1.0
    layer_input: LayerInputSpec | None = None
    scaled: bool = False
    recurrent: RecurrentSpec | None = None
    cross: AttentionSpec | None = None

    @property
    def parts(self) -> tuple[MixerSpec | RecurrentSpec | FeedForwardSpec, ...]:
        """Those that there are."""
        return tuple(part for part in (self.mixer, self.recurrent, self.cross, self.feed_forward) if part is not None)


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder-only language model, or, where attention is not causal, an encoder. With an `encoder` it reads what that makes of an input
    of its own; both have one table of tokens.

    `vocab_size` is that of the tokens; `padded_vocab_size` the rows of embedding and head (more where shards must be equal).
    `embedding_width` is that of embedding and head where a projection leads from and to `width`. `learned_positions` is the number of
    learned position embeddings, None without; position p has row p + `position_offset`. `token_types` is the number of learned embeddings
    of segments. `embedding_scale` multiplies embeddings, `logit_scale` logits, before `final_softcap` bounds them.
    """

    width: int
    vocab_size: int
    blocks: tuple[BlockSpec, ...]
    final_norm: NormSpec | None
    tied_head: bool
    max_positions: int
    padded_vocab_size: int = 0
    embedding_width: int | None = None
    embedding_scale: float | None = None
    embedding_norm: NormSpec | None = None
    learned_positions: int | None = None
    position_offset: int = 0
    token_types: int = 0
    head_bias: bool = False
    logit_scale: float = 1.0
    final_softcap: float | None = None
    encoder: DecoderSpec | None = None

    def __post_init__(self) -> None:
        if self.padded_vocab_size == 0:
            object.__setattr__(self, "padded_vocab_size", self.vocab_size)

    @property
    def cache_layers(self) -> tuple[CacheLayer | StateLayer, ...]:
        """What is kept, in order of layers; attention before the recurrent layer of the same block, and before that to the encoder. Layers
        that share have none.
        """
        kept = [part.cache for block in self.blocks for part in (block.mixer, block.recurrent, block.cross) if part is not None]
        return tuple(cache for cache in kept if cache is not None)

    @property
    def cache_of_layers(self) -> tuple[tuple[int, ...], ...]:
        """For each layer, which of `cache_layers` its attention reads, own or shared, which its recurrent layer, and which attention to an
        encoder.
        """
        caches: list[tuple[int, ...]] = []
        count = 0
        for block in self.blocks:
            of_layer: tuple[int, ...] = ()
            if block.mixer is not None and block.mixer.cache_of is not None:
                of_layer = caches[block.mixer.cache_of][:1]
            elif block.mixer is not None:
                of_layer, count = (count,), count + 1
            for part in (block.recurrent, block.cross):
                if part is not None:
                    of_layer, count = (*of_layer, count), count + 1
            caches.append(of_layer)
        return tuple(caches)


PoolingKind = Literal["cls", "last", "mean", "max", "mean_sqrt_len", "weighted_mean"]
OutputActivation = Literal["normalize", "softmax", "sigmoid", "tanh", "identity"]


@dataclass(frozen=True)
class DenseSpec:
    """norm(activation(x W + b)): one layer behind the pooling. `width` is that of its output."""

    width: int
    bias: bool = True
    activation: Activation | Literal["tanh", "sigmoid"] | None = None
    norm: NormSpec | None = None


@dataclass(frozen=True)
class PoolingSpec:
    """A model whose answer is a vector: a backbone, how its hidden states become one, and the layers behind.

    `kinds` are poolings whose results are concatenated. `task` says what the vector is: an embedding, or scores of classes. `per_token`:
    every token has an answer of its own unless a request asks otherwise. `activation` is what answers go through at last.
    """

    backbone: DecoderSpec
    kinds: tuple[PoolingKind, ...]
    dense: tuple[DenseSpec, ...]
    task: Literal["embed", "classify"]
    activation: OutputActivation
    per_token: bool = False

    @property
    def width(self) -> int:
        """Of an answer."""
        return self.dense[-1].width if self.dense else self.backbone.width * len(self.kinds)
