"""DeepSeek V2 and V3, Kimi-K2 (latent attention, grouped routing, a shared expert, dense first layers), and GLM-4.5 (the same experts)."""

from __future__ import annotations

import math
from dataclasses import replace

from jaxllm.models.experts import MTP_LAYERS, TRAINING_KEYS, expert_mlp, expert_rules, first_size, with_experts
from jaxllm.models.family import Family, change_blocks
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.llama import IGNORED, RULES, llama_like
from jaxllm.models.names import decoder_rules
from jaxllm.models.rope import read_rope, rope_spec
from jaxllm.specs import AttendSpec, DecoderSpec, MLASpec, MoESpec, NormSpec, RouterSpec
from jaxllm.weights.rules import rule
from jaxllm.weights.transforms import HEAD_KEYS, HEAD_VALUES, SPLIT_OUTPUTS


def mla_spec(
    config: HFConfig, max_model_len: int | None, *, default_positions: int, interleaved: bool, default_value_dim: int | None = None
) -> MLASpec:
    """Latent attention under DeepSeek's keys."""
    nope, rope_dim, latent = (config.size(key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank"))
    rope = read_rope(config, max_positions=config.size("max_position_embeddings", default_positions))
    scale = (nope + rope_dim) ** -0.5
    if rope.values.get("mscale_all_dim"):
        # YaRN's temperature, of queries and of keys.
        scale *= (1.0 + 0.1 * rope.number("mscale_all_dim") * math.log(max(rope.number("factor"), 1.0))) ** 2
    return MLASpec(
        num_heads=config.size("num_attention_heads"),
        latent_dim=latent,
        nope_dim=nope,
        rope_dim=rope_dim,
        value_dim=config.size("v_head_dim", *(() if default_value_dim is None else (default_value_dim,))),
        attend=AttendSpec(scale, latent=latent),
        rope=rope_spec(rope, rope_dim, max_model_len or rope.context_length(), interleaved=interleaved),
        norm=NormSpec("rms", 1e-6),
        # Null means no latent; absent, the reference takes 1536: better said than guessed.
        q_latent_dim=None if config.given("q_lora_rank") and config.get("q_lora_rank") is None else config.size("q_lora_rank"),
    )


def _experts(config: HFConfig, spec: DecoderSpec, router: RouterSpec) -> DecoderSpec:
    config.expect("moe_layer_freq", 1)
    width, dense = config.size("moe_intermediate_size"), config.get("first_k_dense_replace", 0)
    moe = MoESpec(router, expert_mlp(config, width), shared=expert_mlp(config, width * config.size("n_shared_experts")))
    return with_experts(spec, moe, lambda layer: layer >= dense)


def _corrected_router(config: HFConfig, *, groups: int, top_groups: int, scale: float) -> RouterSpec:
    """Sigmoid scores with a correction of the choice (Wang et al., 2024, arXiv:2408.15664), in groups of experts."""
    config.expect("scoring_func", "sigmoid")
    config.expect("topk_method", "noaux_tc")
    return RouterSpec(
        first_size(config, "n_routed_experts", "num_local_experts"),
        config.size("num_experts_per_tok", 8),
        scores="sigmoid",
        normalised=config.flag("norm_topk_prob", True),
        correction=True,
        groups=config.size("n_group", groups),
        top_groups=config.size("topk_group", top_groups),
        group_top=2,
        scale=config.number("routed_scaling_factor", scale),
    )


def _deepseek_v3_spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    interleaved = config.flag("rope_interleave", True)
    mixer = mla_spec(config, max_model_len, default_positions=4096, interleaved=interleaved)
    spec = llama_like(config, max_model_len, default_positions=4096)
    spec = change_blocks(spec, lambda i, block: replace(block, mixer=mixer))
    return _experts(config, spec, _corrected_router(config, groups=8, top_groups=4, scale=2.5))


def _deepseek_v2_spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    config.expect("scoring_func", "softmax")
    grouped = config.choice("topk_method", {"greedy": False, "group_limited_greedy": True}, "greedy")
    groups, top_groups = config.get("n_group", 1), config.get("topk_group", 1)
    router = RouterSpec(
        first_size(config, "n_routed_experts", "num_local_experts", "num_experts"),
        config.size("num_experts_per_tok"),
        groups=groups if grouped else 1,
        top_groups=top_groups if grouped else 1,
        scale=config.number("routed_scaling_factor", 1.0),
    )
    mixer = mla_spec(config, max_model_len, default_positions=2048, interleaved=True)
    spec = llama_like(config, max_model_len, default_positions=2048, mlp_bias=config.flag("mlp_bias", False))
    return _experts(config, change_blocks(spec, lambda i, block: replace(block, mixer=mixer)), router)


def _glm4_spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    spec = llama_like(
        config,
        max_model_len,
        default_positions=131072,
        partial=0.5,
        norm=NormSpec("rms", config.number("rms_norm_eps", 1e-5)),
        qkv_bias=config.flag("attention_bias", False),
        qk_norm=config.flag("use_qk_norm", False),
    )
    return _experts(config, spec, _corrected_router(config, groups=1, top_groups=1, scale=1.0))


_AT = "model.layers.{i}.self_attn."
MLA_RULES = (
    *decoder_rules(q_norm="self_attn.q_a_layernorm"),
    rule("layers.{i}.attention.q", f"{_AT}q_proj.weight", transform=SPLIT_OUTPUTS),
    rule("layers.{i}.attention.q", f"{_AT}q_b_proj.weight", transform=SPLIT_OUTPUTS),
    rule("layers.{i}.attention.q_down", f"{_AT}q_a_proj.weight"),
    rule("layers.{i}.attention.kv_down", f"{_AT}kv_a_proj_with_mqa.weight"),
    rule("layers.{i}.attention.kv_norm.weight", f"{_AT}kv_a_layernorm.weight"),
    rule("layers.{i}.attention.key_up", f"{_AT}kv_b_proj.weight", transform=HEAD_KEYS),
    rule("layers.{i}.attention.value_up", f"{_AT}kv_b_proj.weight", transform=HEAD_VALUES),
)

DEEPSEEK_V3 = Family(
    "DeepseekV3ForCausalLM",
    _deepseek_v3_spec,
    (*MLA_RULES, *expert_rules(shared="shared_experts")),
    prefix="model.",
    ignored=(*IGNORED, MTP_LAYERS),
    harmless_keys=(*TRAINING_KEYS, "head_dim", "qk_head_dim", "num_nextn_predict_layers", "num_mtp_layers"),
)
DEEPSEEK_V2 = replace(DEEPSEEK_V3, architecture="DeepseekV2ForCausalLM", to_spec=_deepseek_v2_spec, ignored=IGNORED)
GLM4_MOE = replace(
    DEEPSEEK_V3,
    architecture="Glm4MoeForCausalLM",
    to_spec=_glm4_spec,
    rules=(*RULES, *expert_rules(shared="shared_experts")),
)
