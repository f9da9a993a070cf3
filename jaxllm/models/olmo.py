"""OLMo 1 (norms without weights), 2 (norms on the outputs, queries and keys normalised as a whole) and 3 (windowed layers)."""

from __future__ import annotations

from dataclasses import replace

from jaxllm.models.family import Family, change_attention, layer_windows
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.llama import IGNORED, RULES, llama_like
from jaxllm.models.names import decoder_rules
from jaxllm.models.rope import LayerRopes, read_layer_ropes
from jaxllm.specs import DecoderSpec, NormSpec
from jaxllm.weights.transforms import HeadVectors


def _olmo_spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    bias = config.flag("attention_bias", False)
    norm = NormSpec("layer", 1e-5, weight=False, bias=False)
    spec = llama_like(config, max_model_len, default_positions=2048, norm=norm, qkv_bias=bias, out_bias=bias)
    return change_attention(spec, lambda i, mixer: replace(mixer, clip=config.get("clip_qkv")))


def _olmo2_spec(
    config: HFConfig, max_model_len: int | None, ropes: LayerRopes | None = None, windows: list[int | None] | None = None
) -> DecoderSpec:
    bias = config.flag("attention_bias", False)
    spec = llama_like(
        config,
        max_model_len,
        default_positions=2048,
        ropes=ropes,
        windows=windows,
        norm=NormSpec("rms_wide", config.number("rms_norm_eps", 1e-5)),
        placement="output",
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
    )
    return change_attention(spec, lambda i, mixer: replace(mixer, qk_norm_over="all"))


def _olmo3_spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    windows = layer_windows(config, config.size("sliding_window", 4096), default=lambda layer: (layer + 1) % 4 != 0)
    positions = config.size("max_position_embeddings", 2048)
    # A theta that is not given by layer type is that of full layers, says the reference.
    ropes = read_layer_ropes(config, max_positions=positions, default_theta=500_000.0, windowed_theta=500_000.0)
    return _olmo2_spec(config, max_model_len, ropes, windows)


_OUTPUT_NORM_RULES = decoder_rules(
    attention_post_norm="post_attention_layernorm", mlp_post_norm="post_feedforward_layernorm", head_norms=HeadVectors("flat")
)

OLMO = Family("OlmoForCausalLM", _olmo_spec, RULES, prefix="model.", ignored=IGNORED)
OLMO2 = Family("Olmo2ForCausalLM", _olmo2_spec, _OUTPUT_NORM_RULES, prefix="model.", ignored=IGNORED)
OLMO3 = replace(OLMO2, architecture="Olmo3ForCausalLM", to_spec=_olmo3_spec)
