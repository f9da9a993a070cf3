"""Llama (1 to 3.x) and the models that share its architecture; its names are those of most later families."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jaxllm.models.family import ACTIVATIONS, Family, head_sizes
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.rope import read_rope, rope_spec
from jaxllm.specs import AttendSpec, AttentionSpec, BlockSpec, DecoderSpec, MLPSpec, NormSpec
from jaxllm.weights.rules import rule
from jaxllm.weights.transforms import FUSE_QKV, INTERLEAVE, SPLIT_INPUTS, TOKEN_ROWS


def llama_like(
    config: HFConfig,
    max_model_len: int | None,
    *,
    default_positions: int,
    windows: Sequence[int | None] | None = None,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> DecoderSpec:
    """The spec of a decoder built like Llama, under Llama's config keys.

    Args:
        config: the model's config.
        max_model_len: longest sequence of the engine; None: the config's own.
        default_positions: context where the config does not say.
        windows: attention window by layer; None: full attention everywhere.
        qkv_bias, out_bias, mlp_bias: which projections have biases.
        qk_norm: whether heads of queries and keys are normalised.
    """
    heads, kv_heads, head_dim = head_sizes(config)
    # The first Llama checkpoints spelt it max_sequence_length.
    positions = config.size("max_position_embeddings", config.get("max_sequence_length", default_positions))
    rope = read_rope(config, max_positions=positions)
    norm = NormSpec("rms", config.number("rms_norm_eps", 1e-6))
    attention = AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        attend=AttendSpec(scale=head_dim**-0.5),
        rope=rope_spec(rope, head_dim, max_model_len or rope.context_length()),
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        qk_norm=norm if qk_norm else None,
    )
    mlp = MLPSpec(width=config.size("intermediate_size"), activation=config.choice("hidden_act", ACTIVATIONS, "silu"), bias=mlp_bias)

    def block(window: int | None) -> BlockSpec:
        return BlockSpec(replace(attention, attend=replace(attention.attend, window=window)), mlp, norm)

    return DecoderSpec(
        width=config.size("hidden_size"),
        vocab_size=config.size("vocab_size"),
        blocks=tuple(block(window) for window in windows or [None] * config.size("num_hidden_layers")),
        final_norm=norm,
        tied_head=config.flag("tie_word_embeddings", False),
        max_positions=rope.context_length(),
    )


def _spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    bias = config.flag("attention_bias", False)
    mlp_bias = config.flag("mlp_bias", False)
    return llama_like(config, max_model_len, default_positions=2048, qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias)


_LAYER = "model.layers.{i}"
_QKV = tuple(f"{_LAYER}.self_attn.{x}_proj" for x in "qkv")
_GATE_UP = tuple(f"{_LAYER}.mlp.{x}_proj" for x in ("gate", "up"))

RULES = (
    rule("embed.weight", "model.embed_tokens.weight", transform=TOKEN_ROWS),
    rule("layers.{i}.attention_norm.weight", f"{_LAYER}.input_layernorm.weight"),
    rule("layers.{i}.attention.qkv", *(f"{name}.weight" for name in _QKV), transform=FUSE_QKV),
    rule("layers.{i}.attention.qkv_bias", *(f"{name}.bias" for name in _QKV), transform=FUSE_QKV),
    rule("layers.{i}.attention.q_norm.weight", f"{_LAYER}.self_attn.q_norm.weight"),
    rule("layers.{i}.attention.k_norm.weight", f"{_LAYER}.self_attn.k_norm.weight"),
    rule("layers.{i}.attention.out", f"{_LAYER}.self_attn.o_proj.weight", transform=SPLIT_INPUTS),
    rule("layers.{i}.attention.out_bias", f"{_LAYER}.self_attn.o_proj.bias"),
    rule("layers.{i}.mlp_norm.weight", f"{_LAYER}.post_attention_layernorm.weight"),
    rule("layers.{i}.mlp.gate_up", *(f"{name}.weight" for name in _GATE_UP), transform=INTERLEAVE),
    rule("layers.{i}.mlp.gate_up_bias", *(f"{name}.bias" for name in _GATE_UP), transform=INTERLEAVE),
    rule("layers.{i}.mlp.down", f"{_LAYER}.mlp.down_proj.weight"),
    rule("layers.{i}.mlp.down_bias", f"{_LAYER}.mlp.down_proj.bias"),
    rule("final_norm.weight", "model.norm.weight"),
    rule("head.weight", "lm_head.weight", transform=TOKEN_ROWS),
)
# Frequencies that old checkpoints stored; they follow from the config.
IGNORED = (r".*rotary_emb\.inv_freq",)

LLAMA = Family("LlamaForCausalLM", _spec, RULES, prefix="model.", ignored=IGNORED)
