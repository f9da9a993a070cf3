"""Ernie 4.5 with experts: softmax scores with a correction of the choice; some layers are dense."""

from __future__ import annotations

from dataclasses import replace

from jaxllm.models.experts import TRAINING_KEYS, expert_mlp, expert_rules, first_size, with_experts
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.llama import RULES
from jaxllm.models.llama_kin import ERNIE, ernie_like
from jaxllm.specs import DecoderSpec, MoESpec, RouterSpec
from jaxllm.weights.transforms import ROW


def _spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    config.expect("use_bias", False)
    config.expect("moe_gate", "topk")
    config.expect("moe_use_aux_free", True)
    spec = ernie_like(config, max_model_len)
    router = RouterSpec(
        first_size(config, "moe_num_experts", "num_experts"),
        first_size(config, "moe_k", "num_experts_per_tok"),
        normalised=True,
        correction=True,
        least_sum=config.number("moe_norm_min", 1e-12),
    )
    width, shared = config.size("moe_intermediate_size"), config.get("moe_num_shared_experts", 2)
    moe = MoESpec(router, expert_mlp(config, width), shared=expert_mlp(config, width * shared) if shared else None)
    step, first, last = config.get("moe_layer_interval", 1), config.get("moe_layer_start_index", 1), config.get("moe_layer_end_index", -1)
    last = len(spec.blocks) - 1 if last == -1 else last
    return with_experts(spec, moe, lambda layer: first <= layer <= last and (layer + 1) % step == 0)


ERNIE_MOE = replace(
    ERNIE,
    architecture="Ernie4_5_MoeForCausalLM",
    to_spec=_spec,
    rules=(
        *RULES,
        *expert_rules(shared="shared_experts", correction="moe_statics.e_score_correction_bias", correction_as=ROW),
    ),
    ignored=(*ERNIE.ignored, r"model\.mtp.*"),
    harmless_keys=(*ERNIE.harmless_keys, *TRAINING_KEYS, "moe_capacity", "num_nextn_predict_layers"),
)
