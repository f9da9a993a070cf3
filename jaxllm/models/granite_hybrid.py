"""Granite 4: Mamba 2 and attention by turns, Granite's multipliers, and experts beside the feed-forward or none."""

from __future__ import annotations

from dataclasses import replace

from jaxllm.errors import ModelLoadError
from jaxllm.models.experts import TRAINING_KEYS, expert_mlp
from jaxllm.models.family import Family, change_blocks
from jaxllm.models.granite_moe import GRANITE_MOE_RULES, granite_experts
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.llama import IGNORED
from jaxllm.models.llama_kin import granite_like
from jaxllm.models.mamba import HARMLESS, mamba2_of_hybrid
from jaxllm.models.state_names import mamba2_rules
from jaxllm.specs import AttentionSpec, BlockSpec, DecoderSpec, NormSpec
from jaxllm.weights.rules import Source, rule
from jaxllm.weights.transforms import INTERLEAVE

_RECURRENT = {"mamba": True, "linear_attention": True, "attention": False, "full_attention": False}


def _spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    spec = granite_like(config, max_model_len)
    types = config.get("layer_types", config.get("layers_block_type", ["mamba"] * len(spec.blocks)))
    if len(types) != len(spec.blocks) or set(types) - _RECURRENT.keys():
        raise ModelLoadError(f"config.json: layer_types must say mamba or attention for each of {len(spec.blocks)} layers, got {types}")
    norm = NormSpec("rms", config.number("rms_norm_eps", 1e-6))
    mamba = mamba2_of_hybrid(config, int(config.number("mamba_expand", 2) * spec.width), norm)
    rotated = config.choice("position_embedding_type", {"rope": True, "nope": False}, "nope")
    has_experts = config.get("num_local_experts", 8) > 0
    mlp = granite_experts(config) if has_experts else expert_mlp(config, config.size("shared_intermediate_size", 1024))

    def change(i: int, block: BlockSpec) -> BlockSpec:
        assert isinstance(block.mixer, AttentionSpec)
        if _RECURRENT[types[i]]:
            return replace(block, mixer=None, recurrent=mamba, feed_forward=mlp)
        return replace(block, mixer=block.mixer if rotated else replace(block.mixer, rope=None), feed_forward=mlp)

    return change_blocks(spec, change)


_SHARED = "model.layers.{i}.shared_mlp."
_RULES = (
    *(r for r in GRANITE_MOE_RULES if r.param not in ("layers.{i}.mlp.gate_up", "layers.{i}.mlp.down")),
    *mamba2_rules("model.layers.{i}.mamba"),
    rule(
        "layers.{i}.mlp.gate_up",
        *(Source(f"{_SHARED}input_linear.weight", part=part, parts=2) for part in range(2)),
        transform=INTERLEAVE,
    ),
    rule("layers.{i}.mlp.down", f"{_SHARED}output_linear.weight"),
)

GRANITE_HYBRID = Family(
    "GraniteMoeHybridForCausalLM",
    _spec,
    _RULES,
    prefix="model.",
    ignored=IGNORED,
    harmless_keys=(*HARMLESS, *TRAINING_KEYS, "num_experts_per_tok", "init_method", "normalization_function"),
)
