"""Falcon-H1: attention and Mamba 2 side by side in every layer, with a multiplier on everything."""

from __future__ import annotations

from dataclasses import replace

from jaxllm.errors import ModelLoadError
from jaxllm.models.family import Family, change_blocks
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.llama import IGNORED, llama_like
from jaxllm.models.mamba import HARMLESS, mamba2_of_hybrid
from jaxllm.models.names import decoder_rules
from jaxllm.models.state_names import mamba2_rules
from jaxllm.specs import AttentionSpec, BlockSpec, DecoderSpec, MLPSpec, NormSpec

_BIASES = ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias")


def _spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    biases = [key for key in _BIASES if config.flag(key, False)]
    if biases:
        # Multipliers stand before projections: they are folded into what comes after, which a bias would not allow.
        raise ModelLoadError(f"config.json: {', '.join(biases)} is not supported for this architecture")
    config.expect("mamba_use_mlp", True)
    norm = NormSpec("rms", config.number("rms_norm_eps", 1e-5))
    spec = llama_like(config, max_model_len, default_positions=8192, norm=norm)
    inner = config.get("mamba_d_ssm", int(config.number("mamba_expand", 2) * spec.width))
    before, ssm_before = config.number("attention_in_multiplier", 1.0), config.number("ssm_in_multiplier", 1.0)
    gate, down = config.get("mlp_multipliers", (1.0, 1.0))
    z, x, b, c, dt = (ssm_before * scale for scale in config.get("ssm_multipliers", (1.0,) * 5))
    mamba = mamba2_of_hybrid(
        config,
        inner,
        replace(norm, kind="rms_wide") if config.flag("mamba_rms_norm", False) else None,
        norm_first=config.flag("mamba_norm_before_gate", True),
        scales=(z, x, b, c, dt),
        out_scale=config.number("ssm_out_multiplier", 1.0),
    )

    def change(i: int, block: BlockSpec) -> BlockSpec:
        assert isinstance(block.mixer, AttentionSpec)
        assert isinstance(block.feed_forward, MLPSpec)
        scale = block.mixer.attend.scale * before**2 * config.number("key_multiplier", 1.0)
        attention = replace(
            block.mixer,
            attend=replace(block.mixer.attend, scale=scale),
            out_scale=before * config.number("attention_out_multiplier", 1.0),
        )
        mlp = replace(block.feed_forward, gate_scale=float(gate), out_scale=float(down))
        return replace(block, mixer=attention, recurrent=mamba, feed_forward=mlp)

    return replace(
        change_blocks(spec, change),
        embedding_scale=config.number("embedding_multiplier", 1.0),
        logit_scale=config.number("lm_head_multiplier", 1.0),
    )


_RULES = (
    *decoder_rules(
        mlp_norm="pre_ff_layernorm",
        gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
        final_norm="final_layernorm",
    ),
    *mamba2_rules("model.layers.{i}.mamba"),
)

FALCON_H1 = Family(
    "FalconH1ForCausalLM", _spec, _RULES, prefix="model.", ignored=IGNORED, harmless_keys=(*HARMLESS, "mlp_expansion_factor")
)
