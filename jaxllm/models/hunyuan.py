"""Hunyuan, dense and with experts: queries and keys are normalised after they are rotated; a rope base stretched once and for all."""

from __future__ import annotations

from dataclasses import replace

from jaxllm.errors import ModelLoadError
from jaxllm.models.experts import TRAINING_KEYS, expert_mlp, expert_rules, with_experts
from jaxllm.models.family import Family, change_attention, head_sizes
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.llama import IGNORED, llama_like
from jaxllm.models.names import decoder_rules
from jaxllm.models.rope import LayerRopes, read_rope
from jaxllm.specs import DecoderSpec, MoESpec, RouterSpec


def _spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    bias = config.flag("attention_bias", False)
    for key in ("use_qk_norm", "use_rotary_pos_emb"):
        config.expect(key, True)
    config.expect("norm_type", "rms")
    config.expect("use_cla", False)
    config.expect("attention_head_dim", head_sizes(config)[2])
    positions = config.size("max_position_embeddings", 2048)
    entry = {**config.get("rope_parameters", {}), **config.get("rope_scaling", {})}
    if entry.get("alpha"):
        # Released configs list the options of other scalings beside it, which have no effect.
        entry = {key: value for key, value in entry.items() if key in ("type", "rope_type", "alpha", "rope_theta")}
    rope = read_rope(config, max_positions=positions, default_theta=config.number("rope_theta", 10000.0), values=entry)
    spec = llama_like(
        config,
        max_model_len,
        default_positions=positions,
        ropes=LayerRopes(rope, rope),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
    )
    return change_attention(spec, lambda i, mixer: replace(mixer, qk_norm_after_rope=True))


def _moe_spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    width = config.size("intermediate_size")
    experts, chosen = _of_every_layer(config, "num_experts", 1), _of_every_layer(config, "moe_topk", 1)
    if _of_every_layer(config, "moe_intermediate_size", width) != width or _of_every_layer(config, "num_shared_expert", 1) != 1:
        raise ModelLoadError(f"config.json: only one shared expert, and experts of intermediate_size={width}, are supported")
    config.expect("moe_layer_num_skipped", 0)
    for key in ("norm_topk_prob", "use_mixed_mlp_moe"):
        config.expect(key, True)
    expert = expert_mlp(config, width)
    moe = MoESpec(RouterSpec(experts, chosen, normalised=True), expert, shared=expert)
    return with_experts(_spec(config, max_model_len), moe)


def _of_every_layer(config: HFConfig, key: str, default: int) -> int:
    """A size that may be spelt as a list with an entry a layer."""
    value = config.get(key, default)
    values = set(value) if isinstance(value, list) else {value}
    if len(values) != 1:
        raise ModelLoadError(f"config.json: {key} must be the same in every layer, got {value}")
    return int(values.pop())


_RULES = decoder_rules(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm")

# Token ids, and what releases keep of a multimodal and a classifying sibling.
_HARMLESS = (
    "cla_share_factor", "class_num", "dense_list", "eod_token_id", "im_end_id", "im_newline_id", "im_start_id", "image_token_id",
    "mask_init_id", "num_media_embeds", "org_vocab_size", "pad_id", "pool_type", "text_end_id", "text_start_id", "video_end_id",
    "video_start_id", "vit_input_resolution", "vit_mapping_type", "vit_norm_type", "vit_patch", "vit_token",
)  # fmt: skip
HUNYUAN = Family("HunYuanDenseV1ForCausalLM", _spec, _RULES, prefix="model.", ignored=IGNORED, harmless_keys=_HARMLESS)
HUNYUAN_MOE = replace(
    HUNYUAN,
    architecture="HunYuanMoEV1ForCausalLM",
    to_spec=_moe_spec,
    rules=(*_RULES, *expert_rules(router="gate.wg", shared="shared_mlp")),
    harmless_keys=(*HUNYUAN.harmless_keys, *TRAINING_KEYS),
)
