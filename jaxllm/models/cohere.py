"""Cohere (Command R, Aya): attention and MLP side by side behind one norm, neighbouring dimensions rotated; Cohere 2 with windowed layers,
and no rotation in the full ones.
"""

from __future__ import annotations

from dataclasses import replace

from jaxllm.models.family import Family, change_attention, layer_windows, only_rotated
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.llama import IGNORED, llama_like
from jaxllm.models.names import decoder_rules
from jaxllm.specs import DecoderSpec, NormSpec
from jaxllm.weights.transforms import HeadVectors


def _spec(config: HFConfig, max_model_len: int | None, windows: list[int | None] | None = None) -> DecoderSpec:
    bias = config.flag("attention_bias", False)
    norm = NormSpec("layer", config.number("layer_norm_eps", 1e-5), bias=False)
    spec = llama_like(
        config,
        max_model_len,
        default_positions=8192,
        default_theta=10_000.0 if windows else 500_000.0,
        windows=windows,
        interleaved=True,
        norm=norm,
        placement="parallel_shared",
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=config.flag("use_qk_norm", False),
        tied=True,
    )
    spec = change_attention(spec, lambda i, mixer: replace(mixer, qk_norm_over="each"))
    return replace(spec, logit_scale=config.number("logit_scale", 0.0625))


def _cohere2_spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    pattern = config.size("sliding_window_pattern", 4)
    for key, value in (
        ("layer_switch", pattern), ("order_of_interleaved_layers", "local_attn_first"), ("position_embedding_type", "rope_gptj"),
        ("rotary_pct", 1.0), ("use_embedding_sharing", True), ("use_gated_activation", True), ("use_parallel_block", True),
        ("use_parallel_embedding", False),
    ):  # fmt: skip
        config.expect(key, value)
    windows = layer_windows(config, config.size("sliding_window", 4096), default=lambda layer: (layer + 1) % pattern != 0)
    return only_rotated(_spec(config, max_model_len, windows), windows)


_RULES = decoder_rules(head_norms=HeadVectors("rows"))

COHERE = Family("CohereForCausalLM", _spec, _RULES, prefix="model.", ignored=IGNORED)
COHERE2 = replace(COHERE, architecture="Cohere2ForCausalLM", to_spec=_cohere2_spec)
