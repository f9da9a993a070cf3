"""gpt-oss: attention sinks, windows in every other layer, experts with biases and a bounded gate; released in MXFP4."""

from __future__ import annotations

from dataclasses import replace

from jaxllm.models.experts import TRAINING_KEYS, expert_rules, first_size, with_experts
from jaxllm.models.family import Family, change_attention, layer_windows
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.llama import IGNORED, RULES, llama_like
from jaxllm.specs import DecoderSpec, MLPSpec, MoESpec, RouterSpec
from jaxllm.weights.rules import rule
from jaxllm.weights.transforms import FLAT


def _spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    # Absent, the reference takes 64, whatever the width: better said than guessed.
    config.size("head_dim")
    if config.get("rope_scaling") is None:
        config.need("rope_parameters")  # likewise a YaRN
    config.expect("hidden_act", "silu")
    config.expect("swiglu_alpha", 1.702)
    bias = config.flag("attention_bias", True)
    windows = layer_windows(config, config.size("sliding_window", 128), default=lambda layer: layer % 2 == 0)
    spec = llama_like(
        config,
        max_model_len,
        default_positions=131072,
        default_theta=150_000.0,
        windows=windows,
        qkv_bias=bias,
        out_bias=bias,
        activation="quick_gelu",
    )
    spec = change_attention(spec, lambda i, mixer: replace(mixer, sinks=True))
    expert = MLPSpec(config.size("intermediate_size"), "quick_gelu", bias=True, limit=config.number("swiglu_limit", 7.0))
    experts, chosen = first_size(config, "num_local_experts", "num_experts"), config.size("num_experts_per_tok", 4)
    return with_experts(spec, MoESpec(RouterSpec(experts, chosen, normalised=True, bias=True), expert))


GPT_OSS = Family(
    "GptOssForCausalLM",
    _spec,
    (
        *RULES,
        *expert_rules(router="router", layout="alternating"),
        rule("layers.{i}.attention.sinks", "model.layers.{i}.self_attn.sinks", transform=FLAT),
    ),
    prefix="model.",
    ignored=IGNORED,
    harmless_keys=(*TRAINING_KEYS, "experts_per_token", "initial_context_length"),
)
