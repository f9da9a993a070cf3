"""Qwen3-Next and Qwen3.5 (text): gated delta nets, with gated attention between."""

from __future__ import annotations

from dataclasses import replace

from jaxllm.errors import ModelLoadError
from jaxllm.models.experts import TRAINING_KEYS, expert_mlp, expert_rules, sparse_layers, with_experts
from jaxllm.models.family import ACTIVATIONS, Family, change_blocks, text_half
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.llama import IGNORED, llama_like
from jaxllm.models.names import decoder_rules
from jaxllm.models.rope import LayerRopes, read_rope
from jaxllm.models.state_names import delta_net_rules
from jaxllm.specs import AttentionSpec, BlockSpec, DecoderSpec, DeltaNetSpec, MoESpec, NormSpec, RouterSpec
from jaxllm.weights.rules import rule
from jaxllm.weights.transforms import GATED_QKV, HEAD_GATES


def _delta_net(config: HFConfig) -> DeltaNetSpec:
    heads, groups = config.size("linear_num_value_heads", 32), config.size("linear_num_key_heads", 16)
    if heads % groups:
        raise ModelLoadError(f"config.json: linear_num_value_heads={heads} must be a multiple of linear_num_key_heads={groups}")
    return DeltaNetSpec(
        num_heads=heads,
        num_groups=groups,
        key_dim=config.size("linear_key_head_dim", 128),
        value_dim=config.size("linear_value_head_dim", 128),
        conv_width=config.size("linear_conv_kernel_dim", 4),
        activation=config.choice("hidden_act", ACTIVATIONS, "silu"),
        norm=NormSpec("rms", config.number("rms_norm_eps", 1e-6)),
    )


def _layer_types(config: HFConfig) -> list[str]:
    layers, interval = config.size("num_hidden_layers"), config.size("full_attention_interval", 4)
    types = config.get("layer_types", ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(layers)])
    if set(types) - {"full_attention", "linear_attention"} or len(types) != layers:
        raise ModelLoadError(f"config.json: layer_types must have full_attention or linear_attention for each of {layers} layers")
    return types


def _hybrid(config: HFConfig, max_model_len: int | None, mlp_width: int | None = None) -> DecoderSpec:
    """The spec under the keys that Qwen3-Next and Qwen3.5 share, with plain feed-forwards of `mlp_width` (None: as the config says)."""
    # Without it the reference takes 256, whatever the width: better said than guessed.
    config.size("head_dim")
    if not config.flag("attn_output_gate", True) or config.flag("attention_bias", False):
        raise ModelLoadError("config.json: attn_output_gate=false and attention_bias=true are not supported for this architecture")
    # In text the three positions of a multimodal rope are one.
    rope = {key: value for key, value in config.get("rope_parameters", {}).items() if not key.startswith("mrope_")}
    positions = config.size("max_position_embeddings", 32768)
    theta = config.number("rope_theta", 10000.0)
    full = read_rope(config, max_positions=positions, default_theta=theta, values=rope or config.get("rope_scaling", {}), partial=0.25)
    norm = NormSpec("rms_plus_one", config.number("rms_norm_eps", 1e-6))
    ropes = LayerRopes(full, full)
    spec = llama_like(config, max_model_len, default_positions=32768, ropes=ropes, norm=norm, qk_norm=True, mlp_width=mlp_width)
    delta_net, types = _delta_net(config), _layer_types(config)

    def change(i: int, block: BlockSpec) -> BlockSpec:
        if types[i] == "linear_attention":
            return replace(block, mixer=None, recurrent=delta_net)
        assert isinstance(block.mixer, AttentionSpec)
        return replace(block, mixer=replace(block.mixer, gated=True))

    return change_blocks(spec, change)


def _with_experts(config: HFConfig, spec: DecoderSpec, *, normalised: bool) -> DecoderSpec:
    router = RouterSpec(config.size("num_experts"), config.size("num_experts_per_tok"), normalised=normalised)
    expert, shared = (expert_mlp(config, config.size(f"{key}_intermediate_size", 512)) for key in ("moe", "shared_expert"))
    return with_experts(spec, MoESpec(router, expert, shared=shared, shared_gate=True), sparse_layers(config))


def _qwen3_next_spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    spec = _hybrid(config, max_model_len)
    return _with_experts(config, spec, normalised=config.flag("norm_topk_prob", True)) if config.get("num_experts", 512) else spec


def _qwen3_5_moe_spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    # There are no plain feed-forwards, and no width for them.
    width = config.size("moe_intermediate_size", 512)
    return _with_experts(config, _hybrid(config, max_model_len, width), normalised=config.flag("norm_topk_prob", True))


_LAYER = "model.layers.{i}"
_ATTENTION = (
    *decoder_rules(fuse=GATED_QKV),
    rule("layers.{i}.attention.gate", f"{_LAYER}.self_attn.q_proj.weight", transform=HEAD_GATES),
)
_EXPERTS = expert_rules(shared="shared_expert", shared_gate="shared_expert_gate")
# Of one projection, ordered by group of heads, and of four.
_GROUPED = delta_net_rules(f"{_LAYER}.linear_attn", ("in_proj_qkvz",), ("in_proj_ba",))
_SPLIT = delta_net_rules(f"{_LAYER}.linear_attn", ("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a"))
# Layers that predict tokens further ahead, and the images' half.
_IGNORED = (*IGNORED, r"mtp\..*", r"model\.visual\..*")
_HARMLESS = ("mlp_only_layers", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype")
_OF_IMAGES = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")

QWEN3_5 = Family("Qwen3_5ForCausalLM", _hybrid, (*_ATTENTION, *_SPLIT), prefix="model.", ignored=_IGNORED, harmless_keys=_HARMLESS)
QWEN3_5_TEXT_HALF = text_half(QWEN3_5, "Qwen3_5ForConditionalGeneration", {}, _OF_IMAGES)
QWEN3_5_MOE = replace(
    QWEN3_5,
    architecture="Qwen3_5MoeForCausalLM",
    to_spec=_qwen3_5_moe_spec,
    rules=(*_ATTENTION, *_SPLIT, *_EXPERTS),
    harmless_keys=(*_HARMLESS, *TRAINING_KEYS, "intermediate_size"),
)
QWEN3_5_MOE_TEXT_HALF = text_half(QWEN3_5_MOE, "Qwen3_5MoeForConditionalGeneration", {}, _OF_IMAGES)
QWEN3_NEXT = replace(QWEN3_5_MOE, architecture="Qwen3NextForCausalLM", to_spec=_qwen3_next_spec, rules=(*_ATTENTION, *_GROUPED, *_EXPERTS))
