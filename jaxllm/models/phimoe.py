"""Phi-3.5-MoE: layer norms, biases, SparseMixer routing."""

from __future__ import annotations

from dataclasses import replace

from jaxllm.models.experts import TRAINING_KEYS, expert_mlp, with_experts
from jaxllm.models.family import Family
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.llama import IGNORED, RULES, llama_like
from jaxllm.models.mixtral import MIXTRAL_EXPERTS
from jaxllm.specs import DecoderSpec, MoESpec, NormSpec, RouterSpec


def _spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    window = config.size("sliding_window") if config.get("sliding_window") else None
    bias = config.flag("attention_bias", False)
    spec = llama_like(
        config,
        max_model_len,
        default_positions=131072,
        default_theta=1_000_000.0,
        windows=[window] * config.size("num_hidden_layers"),
        norm=NormSpec("layer", config.number("rms_norm_eps", 1e-5)),
        qkv_bias=bias,
        out_bias=bias,
    )
    # The rule is written for two experts.
    config.expect("num_experts_per_tok", 2)
    router = RouterSpec(config.size("num_local_experts", 16), 2, "sparsemixer", jitter=config.number("router_jitter_noise", 0.01))
    moe = MoESpec(router, expert_mlp(config, config.size("intermediate_size")))
    return replace(with_experts(spec, moe), head_bias=config.flag("lm_head_bias", False))


PHIMOE = Family(
    "PhiMoEForCausalLM",
    _spec,
    (*RULES, *MIXTRAL_EXPERTS),
    prefix="model.",
    ignored=IGNORED,
    harmless_keys=TRAINING_KEYS,
)
# As transformers spells it.
PHIMOE_RESPELT = replace(PHIMOE, architecture="PhimoeForCausalLM")
