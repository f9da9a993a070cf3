"""Mixtral, and MiniMax-M2 (sigmoid scores with a correction, normalised queries and keys, half of each head rotated)."""

from __future__ import annotations

from dataclasses import replace

from jaxllm.models.experts import MTP_LAYERS, TRAINING_KEYS, expert_mlp, expert_rules, first_size, with_experts
from jaxllm.models.family import Family, change_attention
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.llama import IGNORED, RULES, llama_like
from jaxllm.models.names import decoder_rules
from jaxllm.models.rope import LayerRopes, read_rope
from jaxllm.specs import DecoderSpec, MoESpec, RouterSpec
from jaxllm.weights.transforms import HeadVectors


def _experts(config: HFConfig, **router: bool | str) -> MoESpec:
    experts = first_size(config, "num_local_experts", "num_experts")
    choice = RouterSpec(experts, config.size("num_experts_per_tok"), normalised=True, **router)  # type: ignore[arg-type]
    return MoESpec(choice, expert_mlp(config, config.size("intermediate_size")))


def _mixtral_spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    window = config.size("sliding_window") if config.get("sliding_window") else None
    windows = [window] * config.size("num_hidden_layers")
    spec = llama_like(config, max_model_len, default_positions=131072, default_theta=1_000_000.0, windows=windows)
    return with_experts(spec, _experts(config))


def _minimax_spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    for key, value in (("use_qk_norm", True), ("qk_norm_type", "per_layer"), ("use_routing_bias", True), ("scoring_func", "sigmoid")):
        config.expect(key, value)
    config.expect("shared_intermediate_size", 0)
    positions, head_dim = config.size("max_position_embeddings", 196608), config.size("head_dim")
    # Released configs count the rotated dimensions instead of giving their share.
    share = config.size("rotary_dim", head_dim) / head_dim
    rope = read_rope(config, max_positions=positions, default_theta=5_000_000.0, partial=share)
    spec = llama_like(config, max_model_len, default_positions=positions, ropes=LayerRopes(rope, rope), qk_norm=True)
    spec = change_attention(spec, lambda i, mixer: replace(mixer, qk_norm_over="all"))
    return with_experts(spec, _experts(config, scores="sigmoid", correction=True))


MIXTRAL_EXPERTS = expert_rules(at="model.layers.{i}.block_sparse_moe.", each=("w1", "w3", "w2"), correction="e_score_correction_bias")

MIXTRAL = Family(
    "MixtralForCausalLM", _mixtral_spec, (*RULES, *MIXTRAL_EXPERTS), prefix="model.", ignored=IGNORED, harmless_keys=TRAINING_KEYS
)
MINIMAX_M2 = Family(
    "MiniMaxM2ForCausalLM",
    _minimax_spec,
    (*decoder_rules(head_norms=HeadVectors("flat")), *MIXTRAL_EXPERTS),
    prefix="model.",
    ignored=(*IGNORED, MTP_LAYERS),
    harmless_keys=(*TRAINING_KEYS, "use_mtp", "mtp_transformer_layers", "num_mtp_modules"),
)
