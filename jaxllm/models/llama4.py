"""Llama 4 (text): chunks with rotation between full layers without, queries that grow with the position, one expert a token."""

from __future__ import annotations

from dataclasses import replace

from jaxllm.errors import ModelLoadError
from jaxllm.models.experts import TRAINING_KEYS, expert_mlp, expert_rules, with_experts
from jaxllm.models.family import Family, change_attention, change_blocks, text_half
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.llama import IGNORED, llama_like
from jaxllm.models.names import decoder_rules
from jaxllm.specs import AttentionSpec, BlockSpec, DecoderSpec, MoESpec, NormSpec, RouterSpec, TemperatureSpec


def _spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    layers, interval = config.size("num_hidden_layers"), config.size("no_rope_layer_interval", 4)
    # Whatever its name says, the list has a one where a layer rotates.
    rotated = config.get("no_rope_layers") or [(i + 1) % interval != 0 for i in range(layers)]
    bias = config.flag("attention_bias", False)
    norm = NormSpec("rms", config.number("rms_norm_eps", 1e-5))
    spec = llama_like(
        config,
        max_model_len,
        default_positions=131072,
        default_theta=500_000.0,
        interleaved=True,
        norm=norm,
        qkv_bias=bias,
        out_bias=bias,
    )
    chunks, normed = _chunks(config, rotated), config.flag("use_qk_norm", True)
    tuned = config.flag("attn_temperature_tuning", True)
    temperature = TemperatureSpec(config.number("attn_scale", 0.1), config.number("floor_scale", 8192.0), 1.0)
    dense = config.size("intermediate_size_mlp", 16384)

    def attention(i: int, mixer: AttentionSpec) -> AttentionSpec:
        mixer = replace(mixer, attend=replace(mixer.attend, window=chunks[i], chunked=chunks[i] is not None))
        if rotated[i]:
            return replace(mixer, qk_norm=replace(norm, weight=False) if normed else None, qk_norm_after_rope=True)
        return replace(mixer, rope=None, temperature=temperature if tuned else None)

    def block(i: int, block: BlockSpec) -> BlockSpec:
        return replace(block, feed_forward=expert_mlp(config, dense))

    step = config.size("interleave_moe_layer_step", 1)
    sparse = config.get("moe_layers") or range(step - 1, layers, step)
    expert = expert_mlp(config, config.size("intermediate_size"))
    router = RouterSpec(config.size("num_local_experts", 16), config.size("num_experts_per_tok", 1), "sigmoid")
    moe = MoESpec(router, expert, shared=expert, weigh_inputs=True)
    spec = change_blocks(change_attention(spec, attention), block)
    return with_experts(spec, moe, lambda layer: layer in sparse)


def _chunks(config: HFConfig, rotated: list[object]) -> list[int | None]:
    """The chunk of each layer, None for full attention."""
    chunk = config.size("attention_chunk_size", 8192) if config.get("attention_chunk_size", 8192) is not None else None
    types = config.get("layer_types") or ["chunked_attention" if rotates else "full_attention" for rotates in rotated]
    unknown = sorted(set(map(str, types)) - {"full_attention", "chunked_attention"})
    if unknown or len(types) != len(rotated):
        raise ModelLoadError(
            f"config.json: layer_types has {len(types)} entries for {len(rotated)} layers"
            + (f" and {', '.join(unknown)}; supported: full_attention, chunked_attention" if unknown else "")
        )
    return [chunk if kind == "chunked_attention" else None for kind in types]


_AT = "feed_forward."
LLAMA4_TEXT = Family(
    "Llama4ForCausalLM",
    _spec,
    (
        *decoder_rules(gate_up=(f"{_AT}gate_proj", f"{_AT}up_proj"), down=f"{_AT}down_proj"),
        *expert_rules(at=f"model.layers.{{i}}.{_AT}", router="router", layout="transposed", shared="shared_expert"),
    ),
    prefix="model.",
    ignored=IGNORED,
    harmless_keys=(*TRAINING_KEYS, "for_llm_compressor"),
)
LLAMA4 = text_half(LLAMA4_TEXT, "Llama4ForConditionalGeneration", {}, ("boi_token_index", "eoi_token_index", "image_token_index"))
