"""Gemma 1 to 3: scaled embeddings, and norms that store their weights' difference from one. Gemma 2 brings windowed layers, sandwich
norms and softcaps; Gemma 3 normalised heads and a rope of its own for windowed layers.
"""

from __future__ import annotations

from dataclasses import replace

from jaxllm.models.family import ACTIVATIONS, Family, change_attend, layer_windows, text_half
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.llama import IGNORED, RULES, llama_like
from jaxllm.models.names import decoder_rules
from jaxllm.models.rope import LayerRopes, read_layer_ropes
from jaxllm.specs import DecoderSpec, NormSpec, Placement


def gemma_like(
    config: HFConfig,
    max_model_len: int | None,
    *,
    ropes: LayerRopes | None = None,
    windows: list[int | None] | None = None,
    placement: Placement = "sandwich",
    qk_norm: bool = False,
) -> DecoderSpec:
    """What Gemma 1 to 3 have in common; see `llama_like`."""
    # Absent, the reference takes 256, whatever the width: better said than guessed.
    config.size("head_dim")
    bias = config.flag("attention_bias", False)
    # The first release said gelu and meant its approximation; later ones say so, under a new key or both.
    activation = config.choice("hidden_activation", ACTIVATIONS, config.get("hidden_act", "gelu_pytorch_tanh"))
    spec = llama_like(
        config,
        max_model_len,
        default_positions=8192,
        ropes=ropes,
        windows=windows,
        norm=NormSpec("rms_plus_one", config.number("rms_norm_eps", 1e-6)),
        placement=placement,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=qk_norm,
        activation="gelu_tanh" if activation == "gelu" else activation,
        tied=True,
    )
    return replace(spec, embedding_scale=spec.width**0.5)


def _gemma_spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    return gemma_like(config, max_model_len, placement="pre")


def _gemma2_spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    config.expect("sliding_window_size", config.get("sliding_window"))
    windows = layer_windows(config, config.size("sliding_window", 4096), default=lambda layer: layer % 2 == 0)
    spec = gemma_like(config, max_model_len, windows=windows)
    scale = config.number("query_pre_attn_scalar", 256.0) ** -0.5
    spec = change_attend(spec, scale=scale, softcap=config.optional_number("attn_logit_softcapping", 50.0))
    return replace(spec, final_softcap=config.optional_number("final_logit_softcapping", 30.0))


def _gemma3_spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    pattern = config.size("sliding_window_pattern", config.get("_sliding_window_pattern", 6))
    windows = layer_windows(config, config.size("sliding_window", 4096), default=lambda layer: (layer + 1) % pattern != 0)
    # The scaled rope is already part of max_position_embeddings.
    positions = config.size("max_position_embeddings", 131072)
    local_theta = config.number("rope_local_base_freq", 10_000.0)
    ropes = read_layer_ropes(config, max_positions=positions, default_theta=1_000_000.0, windowed_theta=local_theta)
    spec = gemma_like(config, max_model_len or positions, ropes=ropes, windows=windows, qk_norm=True)
    spec = change_attend(spec, scale=config.number("query_pre_attn_scalar", 256.0) ** -0.5)
    return replace(spec, max_positions=positions, final_softcap=config.optional_number("final_logit_softcapping", None))


# Llama's name for the norm before the MLP is here that of the one after attention.
SANDWICH_RULES = decoder_rules(
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)

GEMMA = Family("GemmaForCausalLM", _gemma_spec, RULES, prefix="model.", ignored=IGNORED)
# Residuals of released checkpoints pass 65504 within a few layers.
GEMMA2 = Family("Gemma2ForCausalLM", _gemma2_spec, SANDWICH_RULES, prefix="model.", ignored=IGNORED, float16=False)
GEMMA3 = Family("Gemma3ForCausalLM", _gemma3_spec, SANDWICH_RULES, prefix="model.", ignored=IGNORED, float16=False)
GEMMA3_TEXT_HALF = text_half(
    GEMMA3,
    "Gemma3ForConditionalGeneration",
    defaults={
        "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256,
    },
    harmless=("mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index"),
)  # fmt: skip
