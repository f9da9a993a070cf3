"""Gemma 3 (text): windowed layers with full ones between, a rope of its own for each, sandwich norms, scaled embeddings."""

from __future__ import annotations

from jaxllm.models.family import ACTIVATIONS, Family, head_sizes, layer_windows
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.llama import IGNORED, RULES
from jaxllm.models.rope import RopeParameters, read_rope, rope_spec
from jaxllm.specs import AttendSpec, AttentionSpec, BlockSpec, DecoderSpec, MLPSpec, NormSpec
from jaxllm.weights.rules import rule


def _ropes(config: HFConfig, positions: int) -> tuple[RopeParameters, RopeParameters]:
    """(of full layers, of windowed layers). Older configs have `rope_theta` and `rope_scaling` for the full layers only, and
    `rope_local_base_freq`; newer ones have `rope_parameters` by layer type.
    """
    nested = config.get("rope_parameters", {})
    full = {**nested.get("full_attention", {}), **config.get("rope_scaling", {})}
    windowed = nested.get("sliding_attention", {})
    theta, local_theta = config.number("rope_theta", 1_000_000.0), config.number("rope_local_base_freq", 10_000.0)
    return (
        read_rope(config, max_positions=positions, default_theta=theta, values=full),
        read_rope(config, max_positions=positions, default_theta=local_theta, values=windowed),
    )


def _spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    width = config.size("hidden_size")
    # Absent, the reference takes 256, whatever the width: better said than guessed.
    config.size("head_dim")
    heads, kv_heads, head_dim = head_sizes(config)
    pattern = config.size("sliding_window_pattern", config.get("_sliding_window_pattern", 6))
    windows = layer_windows(config, config.size("sliding_window", 4096), default=lambda layer: (layer + 1) % pattern != 0)
    # The scaled rope is already part of max_position_embeddings.
    positions = config.size("max_position_embeddings", 131072)
    full_rope, windowed_rope = (rope_spec(rope, head_dim, max_model_len or positions) for rope in _ropes(config, positions))
    norm = NormSpec("rms_plus_one", config.number("rms_norm_eps", 1e-6))
    bias = config.flag("attention_bias", False)
    scale = config.number("query_pre_attn_scalar", 256.0) ** -0.5
    mlp = MLPSpec(width=config.size("intermediate_size"), activation=config.choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh"))

    def block(window: int | None) -> BlockSpec:
        attention = AttentionSpec(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            attend=AttendSpec(scale, window),
            rope=full_rope if window is None else windowed_rope,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=norm,
        )
        return BlockSpec(attention, mlp, norm, "sandwich")

    return DecoderSpec(
        width=width,
        vocab_size=config.size("vocab_size"),
        blocks=tuple(block(window) for window in windows),
        final_norm=norm,
        tied_head=config.flag("tie_word_embeddings", True),
        max_positions=positions,
        embedding_scale=width**0.5,
        final_softcap=config.get("final_logit_softcapping"),
    )


_LAYER = "model.layers.{i}"
# Llama's name for the norm before the MLP is here that of the one after attention.
_RULES = (
    *(rule for rule in RULES if rule.param != "layers.{i}.mlp_norm.weight"),
    rule("layers.{i}.attention_post_norm.weight", f"{_LAYER}.post_attention_layernorm.weight"),
    rule("layers.{i}.mlp_norm.weight", f"{_LAYER}.pre_feedforward_layernorm.weight"),
    rule("layers.{i}.mlp_post_norm.weight", f"{_LAYER}.post_feedforward_layernorm.weight"),
)

# Residuals of released checkpoints pass 65504 within a few layers.
GEMMA3 = Family("Gemma3ForCausalLM", _spec, _RULES, prefix="model.", ignored=IGNORED, float16=False)
