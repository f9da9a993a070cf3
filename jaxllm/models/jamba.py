"""Jamba: Mamba with normalised step sizes, attention without positions between, experts in every other layer."""

from __future__ import annotations

import math
from dataclasses import replace

from jaxllm.models.experts import TRAINING_KEYS, expert_rules, with_experts
from jaxllm.models.family import ACTIVATIONS, Family, change_blocks
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.llama import IGNORED, llama_like
from jaxllm.models.mamba import HARMLESS
from jaxllm.models.names import decoder_rules
from jaxllm.models.state_names import mamba_rules
from jaxllm.specs import AttentionSpec, BlockSpec, DecoderSpec, MambaSpec, MLPSpec, MoESpec, RouterSpec


def _spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    config.expect("sliding_window", None)
    config.expect("mamba_inner_layernorms", True)
    spec = llama_like(config, max_model_len, default_positions=262144)
    rank = config.get("mamba_dt_rank", "auto")
    mamba = MambaSpec(
        inner=int(config.number("mamba_expand", 2) * spec.width),
        state_size=config.size("mamba_d_state", 16),
        conv_width=config.size("mamba_d_conv", 4),
        rank=math.ceil(spec.width / 16) if rank == "auto" else config.size("mamba_dt_rank"),
        activation=config.choice("hidden_act", ACTIVATIONS, "silu"),
        bias=config.flag("mamba_proj_bias", False),
        conv_bias=config.flag("mamba_conv_bias", True),
        inner_norm=spec.blocks[0].norm,
    )
    period, offset = config.size("attn_layer_period", 8), config.get("attn_layer_offset", 4)

    def change(i: int, block: BlockSpec) -> BlockSpec:
        assert isinstance(block.mixer, AttentionSpec)
        if i % period == offset:
            return replace(block, mixer=replace(block.mixer, rope=None))
        return replace(block, mixer=None, recurrent=mamba)

    spec = change_blocks(spec, change)
    experts, top_k = config.size("num_experts", 16), config.size("num_experts_per_tok", 2)
    sparse, first = config.size("expert_layer_period", 2), config.get("expert_layer_offset", 1)
    mlp = spec.blocks[0].feed_forward
    assert isinstance(mlp, MLPSpec)
    return with_experts(spec, MoESpec(RouterSpec(experts, top_k), mlp), lambda layer: experts > 1 and layer % sparse == first)


_RULES = (
    *decoder_rules(
        mlp_norm="pre_ff_layernorm",
        gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
        final_norm="final_layernorm",
    ),
    *mamba_rules("model.layers.{i}.mamba"),
    *expert_rules(at="model.layers.{i}.feed_forward.", router="router"),
)

JAMBA = Family("JambaForCausalLM", _spec, _RULES, prefix="model.", ignored=IGNORED, harmless_keys=(*HARMLESS, *TRAINING_KEYS, "n_ctx"))
