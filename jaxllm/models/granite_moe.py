"""Granite with experts, and with a shared one: Granite's multipliers around Mixtral's routing."""

from __future__ import annotations

from dataclasses import replace

from jaxllm.models.experts import TRAINING_KEYS, expert_mlp, expert_rules, with_experts
from jaxllm.models.family import Family
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.llama import IGNORED, RULES
from jaxllm.models.llama_kin import granite_like
from jaxllm.specs import DecoderSpec, MoESpec, RouterSpec
from jaxllm.weights.rules import Source, rule
from jaxllm.weights.transforms import INTERLEAVE


def granite_experts(config: HFConfig) -> MoESpec:
    """Its feed-forward."""
    router = RouterSpec(config.size("num_local_experts", 8), config.size("num_experts_per_tok", 2), normalised=True)
    shared = config.get("shared_intermediate_size", 0)
    return MoESpec(router, expert_mlp(config, config.size("intermediate_size")), shared=expert_mlp(config, shared) if shared else None)


def _spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    return with_experts(granite_like(config, max_model_len), granite_experts(config))


_AT, _SHARED = "model.layers.{i}.block_sparse_moe.", "model.layers.{i}.shared_mlp."
GRANITE_MOE_RULES = (
    *RULES,
    *expert_rules(at=_AT, router="router.layer", stacked=("input_linear.weight", "output_linear.weight")),
    rule(
        "layers.{i}.mlp.shared.gate_up",
        *(Source(f"{_SHARED}input_linear.weight", part=part, parts=2) for part in range(2)),
        transform=INTERLEAVE,
    ),
    rule("layers.{i}.mlp.shared.down", f"{_SHARED}output_linear.weight"),
)

GRANITE_MOE = Family("GraniteMoeForCausalLM", _spec, GRANITE_MOE_RULES, prefix="model.", ignored=IGNORED, harmless_keys=TRAINING_KEYS)
GRANITE_MOE_SHARED = replace(GRANITE_MOE, architecture="GraniteMoeSharedForCausalLM")
