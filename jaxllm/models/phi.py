"""Phi 1 to 2 (attention and MLP side by side, biases everywhere), Phi 3 to 4 (Llama with fused projections)."""

from __future__ import annotations

from dataclasses import replace

from jaxllm.models.family import Family, head_sizes
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.llama import IGNORED, llama_like
from jaxllm.models.names import decoder_rules
from jaxllm.specs import DecoderSpec, NormSpec
from jaxllm.weights.transforms import JOINED_QKV


def _phi_spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    # The first release says both.
    config.expect("rotary_dim", int(config.number("partial_rotary_factor", 0.5) * head_sizes(config)[2]))
    spec = llama_like(
        config,
        max_model_len,
        default_positions=2048,
        partial=0.5,
        norm=NormSpec("layer", config.number("layer_norm_eps", 1e-5)),
        placement="parallel_shared",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        qk_norm=config.flag("qk_layernorm", False),
        activation=None if config.get("hidden_act") else "gelu_tanh",
        gated=False,
    )
    return replace(spec, head_bias=True)


def _phi3_spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    window = config.size("sliding_window") if config.get("sliding_window") else None
    windows = [window] * config.size("num_hidden_layers")
    config.expect("full_attn_mod", 1)
    return llama_like(config, max_model_len, default_positions=4096, partial=1.0, windows=windows)


_PHI_RULES = decoder_rules(
    out="self_attn.dense",
    up="mlp.fc1",
    down="mlp.fc2",
    final_norm="final_layernorm",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
)
_PHI3_RULES = decoder_rules(qkv=("self_attn.qkv_proj",), fuse=JOINED_QKV, gate_up=("mlp.gate_up_proj",))

PHI = Family("PhiForCausalLM", _phi_spec, _PHI_RULES, prefix="model.", ignored=IGNORED)
PHI3 = Family(
    "Phi3ForCausalLM", _phi3_spec, _PHI3_RULES, prefix="model.", ignored=IGNORED, harmless_keys=("interpolate_factor", "lm_head_bias")
)
