"""Qwen2-MoE (a gated shared expert), Qwen3-MoE, and OLMoE (queries and keys normalised over all heads, then bounded)."""

from __future__ import annotations

from dataclasses import replace

from jaxllm.models.experts import TRAINING_KEYS, expert_mlp, expert_rules, first_size, sparse_layers, with_experts
from jaxllm.models.family import Family, change_attention, layer_windows
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.llama import IGNORED, RULES, llama_like
from jaxllm.models.names import decoder_rules
from jaxllm.specs import DecoderSpec, MoESpec, RouterSpec
from jaxllm.weights.transforms import HeadVectors


def _router(config: HFConfig) -> RouterSpec:
    experts = first_size(config, "num_experts", "num_local_experts")
    return RouterSpec(experts, config.size("num_experts_per_tok"), normalised=config.flag("norm_topk_prob", False))


def _qwen2_spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    in_force, first = config.flag("use_sliding_window", False), config.get("max_window_layers", 28)
    window = config.size("sliding_window", 4096) if in_force else config.get("sliding_window") and None
    windows = layer_windows(config, window, default=lambda layer: in_force and layer % 2 == 0 and layer < first)
    bias = config.flag("qkv_bias", True)
    spec = llama_like(config, max_model_len, default_positions=32768, windows=windows, qkv_bias=bias)
    moe = MoESpec(
        _router(config),
        expert_mlp(config, config.size("moe_intermediate_size", 1408)),
        shared=expert_mlp(config, config.size("shared_expert_intermediate_size", 5632)),
        shared_gate=True,
    )
    return with_experts(spec, moe, sparse_layers(config))


def _qwen3_spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    config.expect("shared_expert_intermediate_size", 0)
    config.expect("use_qk_norm", True)
    in_force, window = config.flag("use_sliding_window", False), config.get("sliding_window", 4096)
    windows = [window if in_force else None] * config.size("num_hidden_layers")
    bias = config.flag("attention_bias", False)
    spec = llama_like(config, max_model_len, default_positions=32768, windows=windows, qkv_bias=bias, out_bias=bias, qk_norm=True)
    moe = MoESpec(_router(config), expert_mlp(config, config.size("moe_intermediate_size", 768)))
    return with_experts(spec, moe, sparse_layers(config))


def _olmoe_spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    bias = config.flag("attention_bias", False)
    spec = llama_like(config, max_model_len, default_positions=4096, qkv_bias=bias, out_bias=bias, qk_norm=True)
    spec = change_attention(spec, lambda i, mixer: replace(mixer, qk_norm_over="all", clip=config.optional_number("clip_qkv", None)))
    return with_experts(spec, MoESpec(_router(config), expert_mlp(config, config.size("intermediate_size"))))


QWEN3_MOE = Family(
    "Qwen3MoeForCausalLM",
    _qwen3_spec,
    (*RULES, *expert_rules()),
    prefix="model.",
    ignored=IGNORED,
    harmless_keys=(*TRAINING_KEYS, "max_window_layers"),
)
QWEN2_MOE = replace(
    QWEN3_MOE,
    architecture="Qwen2MoeForCausalLM",
    to_spec=_qwen2_spec,
    rules=(*RULES, *expert_rules(shared="shared_expert", shared_gate="shared_expert_gate")),
)
OLMOE = replace(
    QWEN3_MOE,
    architecture="OlmoeForCausalLM",
    to_spec=_olmoe_spec,
    rules=(*decoder_rules(head_norms=HeadVectors("flat")), *expert_rules()),
)
