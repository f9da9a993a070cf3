"""Families that keep Llama's names for most of what they have, with layer norms or ungated feed-forwards: StableLM, StarCoder 2, Nemotron,
Apertus, Arcee.
"""

from __future__ import annotations

from dataclasses import replace

from jaxllm.models.family import Family, change_attention
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.llama import IGNORED, RULES, llama_like
from jaxllm.models.names import decoder_rules
from jaxllm.models.rope import LayerRopes, read_rope
from jaxllm.specs import DecoderSpec, NormSpec
from jaxllm.weights.rules import rule
from jaxllm.weights.transforms import HeadVectors


def _stablelm_spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    norm = NormSpec("layer", config.number("layer_norm_eps", 1e-5))
    spec = llama_like(
        config,
        max_model_len,
        default_positions=4096,
        partial=0.25,
        norm=norm,
        placement="parallel_shared" if config.flag("use_parallel_residual", False) else "pre",
        qkv_bias=config.flag("use_qkv_bias", False),
    )
    if not config.flag("qk_layernorm", False):
        return spec
    head_norm = replace(norm, bias=False)
    return change_attention(spec, lambda i, mixer: replace(mixer, qk_norm=head_norm, qk_norm_over="each"))


def _starcoder2_spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    config.expect("norm_type", "layer_norm")
    config.expect("mlp_type", "default")
    bias = config.flag("use_bias", True)
    window = config.size("sliding_window") if config.get("sliding_window") else None
    return llama_like(
        config,
        max_model_len,
        default_positions=4096,
        windows=[window] * config.size("num_hidden_layers"),
        norm=NormSpec("layer", config.number("norm_epsilon", 1e-5)),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        activation=None if config.get("hidden_act") else "gelu_tanh",
        gated=False,
        tied=True,
    )


def _nemotron_spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    bias = config.flag("attention_bias", False)
    return llama_like(
        config,
        max_model_len,
        default_positions=4096,
        # Several releases spell it so.
        partial=config.number("rope_percent", config.number("partial_rotary_percent", 0.5)),
        norm=NormSpec("layer_plus_one", config.number("norm_eps", 1e-5)),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
        activation=None if config.get("hidden_act") else "relu_squared",
        gated=False,
    )


def _arcee_spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    bias = config.flag("attention_bias", False)
    return llama_like(
        config,
        max_model_len,
        default_positions=4096,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
        activation=None if config.get("hidden_act") else "relu_squared",
        gated=False,
    )


_APERTUS_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip


def _apertus_spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    config.expect("qk_norm", True)
    config.expect("post_norm", False)
    config.expect("mlp_bias", False)
    positions = config.size("max_position_embeddings", 65536)
    values = config.get("rope_scaling") or config.get("rope_parameters") or _APERTUS_ROPE
    rope = read_rope(config, max_positions=positions, default_theta=config.number("rope_theta", 12_000_000.0), values=values)
    bias = config.flag("attention_bias", False)
    return llama_like(
        config,
        max_model_len,
        default_positions=positions,
        ropes=LayerRopes(rope, rope),
        norm=NormSpec("rms", config.number("rms_norm_eps", 1e-5)),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        activation=None if config.get("hidden_act", "xielu") != "xielu" else "xielu",
        gated=False,
    )


_STABLELM_RULES = decoder_rules(
    q_norm="self_attn.q_layernorm.norms.{j}", k_norm="self_attn.k_layernorm.norms.{j}", head_norms=HeadVectors("separate")
)
_APERTUS_RULES = (
    *decoder_rules(attention_norm="attention_layernorm", mlp_norm="feedforward_layernorm"),
    *(rule(f"layers.{{i}}.mlp.act.{part}", f"model.layers.{{i}}.mlp.act_fn.{part}") for part in ("alpha_p", "alpha_n", "beta", "eps")),
)

STABLELM = Family("StableLmForCausalLM", _stablelm_spec, _STABLELM_RULES, prefix="model.", ignored=IGNORED)
STARCODER2 = Family(
    "Starcoder2ForCausalLM", _starcoder2_spec, decoder_rules(up="mlp.c_fc", down="mlp.c_proj"), prefix="model.", ignored=IGNORED,
    harmless_keys=("residual_dropout", "embedding_dropout"),
)  # fmt: skip
NEMOTRON = Family("NemotronForCausalLM", _nemotron_spec, RULES, prefix="model.", ignored=IGNORED)
ARCEE = replace(NEMOTRON, architecture="ArceeForCausalLM", to_spec=_arcee_spec)
APERTUS = Family("ApertusForCausalLM", _apertus_spec, _APERTUS_RULES, prefix="model.", ignored=IGNORED)
