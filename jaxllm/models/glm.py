"""GLM-4 (neighbouring dimensions of half of each head rotated, fused gate and up), and its 0414 releases (sandwich norms)."""

from __future__ import annotations

from dataclasses import replace

from jaxllm.models.family import Family
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.llama import IGNORED, llama_like
from jaxllm.models.names import decoder_rules
from jaxllm.specs import DecoderSpec, NormSpec, Placement


def _spec(config: HFConfig, max_model_len: int | None, placement: Placement = "pre") -> DecoderSpec:
    # Absent, the references take 128, whatever the width: better said than guessed.
    config.size("head_dim")
    return llama_like(
        config,
        max_model_len,
        default_positions=131072,
        partial=0.5,
        interleaved=True,
        norm=NormSpec("rms", config.number("rms_norm_eps", 1.5625e-7)),
        placement=placement,
        qkv_bias=config.flag("attention_bias", True),
    )


def _glm4_spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    return _spec(config, max_model_len, "sandwich")


_FUSED = ("mlp.gate_up_proj",)

GLM = Family("GlmForCausalLM", _spec, decoder_rules(gate_up=_FUSED), prefix="model.", ignored=IGNORED)
GLM4 = replace(
    GLM,
    architecture="Glm4ForCausalLM",
    to_spec=_glm4_spec,
    rules=decoder_rules(gate_up=_FUSED, attention_post_norm="post_self_attn_layernorm", mlp_post_norm="post_mlp_layernorm"),
    # Known to overflow.
    float16=False,
)
