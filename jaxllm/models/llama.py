"""Llama (1 to 3.x) and the models that share its architecture; its names are those of most later families."""

from __future__ import annotations

from collections.abc import Sequence

from jaxllm.models.family import ACTIVATIONS, Family, head_sizes, with_windows
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.names import decoder_rules
from jaxllm.models.rope import LayerRopes, read_rope, rope_spec
from jaxllm.specs import Activation, AttendSpec, AttentionSpec, BlockSpec, DecoderSpec, MLPSpec, NormSpec, Placement


def llama_like(
    config: HFConfig,
    max_model_len: int | None,
    *,
    default_positions: int,
    default_theta: float = 10000.0,
    ropes: LayerRopes | None = None,
    partial: float | None = None,
    interleaved: bool = False,
    windows: Sequence[int | None] | None = None,
    norm: NormSpec | None = None,
    placement: Placement = "pre",
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    activation: Activation | None = None,
    gated: bool = True,
    mlp_width: int | None = None,
    tied: bool = False,
) -> DecoderSpec:
    """The spec of a decoder built like Llama, under Llama's config keys.

    Args:
        config: the model's config.
        max_model_len: longest sequence of the engine; None: the config's own.
        default_positions, default_theta: context and base of the rotation where the config does not say.
        ropes: those of full and of windowed layers, where they may differ.
        partial: the part of each head that is rotated where the config does not say; None where it must be all.
        interleaved: whether neighbouring dimensions are rotated together.
        windows: attention window by layer; None: full attention everywhere.
        norm: None: a root-mean-square norm with `rms_norm_eps`.
        placement: of the norms.
        qkv_bias, out_bias, mlp_bias: which projections have biases.
        qk_norm: whether heads of queries and keys are normalised.
        activation: None: as `hidden_act` says.
        gated: whether the feed-forward has a gate.
        mlp_width: None: as `intermediate_size` says.
        tied: whether the head is the embedding where the config does not say.
    """
    heads, kv_heads, head_dim = head_sizes(config)
    # The first Llama checkpoints spelt it max_sequence_length.
    positions = config.size("max_position_embeddings", config.get("max_sequence_length", default_positions))
    if ropes is None:
        rope = read_rope(config, max_positions=positions, default_theta=default_theta, partial=partial)
        ropes = LayerRopes(rope, rope)
    longest = max_model_len or ropes.full.context_length()
    full, windowed = (rope_spec(rope, head_dim, longest, interleaved=interleaved) for rope in ropes)
    # Families differ in what they take without it: better said than guessed.
    norm = norm or NormSpec("rms", config.number("rms_norm_eps"))
    attention = AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        attend=AttendSpec(scale=head_dim**-0.5),
        rope=full,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        qk_norm=norm if qk_norm else None,
    )
    activation = activation or config.choice("hidden_act", ACTIVATIONS, "silu")
    block = BlockSpec(attention, MLPSpec(mlp_width or config.size("intermediate_size"), activation, gated, mlp_bias), norm, placement)
    spec = DecoderSpec(
        width=config.size("hidden_size"),
        vocab_size=config.size("vocab_size"),
        blocks=(block,) * config.size("num_hidden_layers"),
        final_norm=norm,
        tied_head=config.flag("tie_word_embeddings", tied),
        max_positions=ropes.full.context_length(),
    )
    return spec if windows is None else with_windows(spec, windows, windowed)


def _spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    bias = config.flag("attention_bias", False)
    mlp_bias = config.flag("mlp_bias", False)
    return llama_like(config, max_model_len, default_positions=2048, qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias)


RULES = decoder_rules()
# Frequencies that old checkpoints stored; they follow from the config.
IGNORED = (r".*rotary_emb\.inv_freq",)

LLAMA = Family("LlamaForCausalLM", _spec, RULES, prefix="model.", ignored=IGNORED)
