"""Gemma 4 (text): heads of two sizes, values that are keys, layers that share keys and values, inputs for each layer, experts."""

from __future__ import annotations

from dataclasses import replace

from jaxllm.errors import ModelLoadError
from jaxllm.models.experts import expert_rules
from jaxllm.models.family import ACTIVATIONS, Family, layer_windows, text_half
from jaxllm.models.gemma import SANDWICH_RULES
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.llama import IGNORED
from jaxllm.models.rope import by_layer_type, read_rope, rope_spec
from jaxllm.specs import AttendSpec, AttentionSpec, BlockSpec, DecoderSpec, LayerInputSpec, MLPSpec, MoESpec, NormSpec, RouterSpec
from jaxllm.weights.rules import rule
from jaxllm.weights.transforms import TOKEN_ROWS, FuseHeads

_ROPES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}


def _spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    width, heads, num_layers = config.size("hidden_size"), config.size("num_attention_heads"), config.size("num_hidden_layers")
    positions = config.size("max_position_embeddings", 131072)
    windows = layer_windows(config, config.size("sliding_window", 512), default=lambda layer: (layer + 1) % 6 != 0)
    # The last layer sees everything, whatever the config says.
    windows[-1] = None
    # Text never attends to what comes after it.
    config.expect("use_bidirectional_attention", "vision")
    norm = NormSpec("rms_wide", config.number("rms_norm_eps", 1e-6))
    activation, bias = config.choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh"), config.flag("attention_bias", False)
    key_is_value = config.flag("attention_k_eq_v", False)
    kv_heads, head_dim = config.size("num_key_value_heads", 4), config.size("head_dim", 256)
    full_sizes = {"head_dim": config.size("global_head_dim", 512)}
    if key_is_value and config.get("num_global_key_value_heads"):
        full_sizes["num_key_value_heads"] = config.size("num_global_key_value_heads")
    # As newer configs say it, by layer.
    sizes = config.get("per_layer_config", {str(i): full_sizes for i, window in enumerate(windows) if window is None})
    unknown = {key for of_layer in sizes.values() for key in of_layer} - {"head_dim", "num_key_value_heads"}
    if unknown:
        raise ModelLoadError(f"config.json: per_layer_config has {', '.join(sorted(unknown))}; only sizes of heads may differ by layer")
    ropes = {**_ROPES, **by_layer_type(config)}
    longest = max_model_len or positions
    num_shared, wide = config.get("num_kv_shared_layers", 0), config.flag("use_double_wide_mlp", False)
    mlp_width, layer_width = config.size("intermediate_size"), config.get("hidden_size_per_layer_input", 256)
    config.expect("vocab_size_per_layer_input", config.size("vocab_size"))
    experts = None
    if config.flag("enable_moe_block", False):
        experts = RouterSpec(config.size("num_experts"), config.size("top_k_experts"), normalised=True, expert_scale=True)

    def attention(layer: int) -> AttentionSpec:
        full = windows[layer] is None
        dim = sizes.get(str(layer), {}).get("head_dim", head_dim)
        rope = read_rope(config, max_positions=positions, values=ropes["full_attention" if full else "sliding_attention"], partial=1.0)
        shared = layer >= num_layers - num_shared
        of_same_kind = [i for i in range(num_layers - num_shared) if (windows[i] is None) == full]
        if shared and not of_same_kind:
            raise ModelLoadError(f"config.json: num_kv_shared_layers={num_shared} leaves layer {layer} no layer of its type to share with")
        return AttentionSpec(
            num_heads=heads,
            num_kv_heads=sizes.get(str(layer), {}).get("num_key_value_heads", kv_heads),
            head_dim=dim,
            attend=AttendSpec(1.0, windows[layer]),
            rope=rope_spec(rope, dim, longest),
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=norm,
            v_norm=None if shared else replace(norm, weight=False),
            key_is_value=key_is_value and full and not shared,
            cache_of=of_same_kind[-1] if shared else None,
        )

    def block(layer: int) -> BlockSpec:
        mixer = attention(layer)
        mlp = MLPSpec(mlp_width * (2 if wide and mixer.cache_of is not None else 1), activation)
        layer_input = LayerInputSpec(layer_width, activation, norm) if layer_width else None
        if experts is None:
            return BlockSpec(mixer, mlp, norm, "sandwich", layer_input=layer_input, scaled=True)
        moe = MoESpec(experts, MLPSpec(config.size("moe_intermediate_size"), activation), shared=mlp, norm=norm)
        return BlockSpec(mixer, moe, norm, "sandwich_mixer", layer_input=layer_input, scaled=True)

    return DecoderSpec(
        width=width,
        vocab_size=config.size("vocab_size"),
        blocks=tuple(block(layer) for layer in range(num_layers)),
        final_norm=norm,
        tied_head=config.flag("tie_word_embeddings", True),
        max_positions=positions,
        embedding_scale=width**0.5,
        final_softcap=config.optional_number("final_logit_softcapping", None),
    )


_LAYER = "model.layers.{i}"
_HEADS = tuple(
    rule(
        f"layers.{{i}}.attention.{parts}{end}", *(f"{_LAYER}.self_attn.{x}_proj.{kind}" for x in parts), transform=FuseHeads(len(parts) - 1)
    )
    for parts in ("q", "qk")
    for end, kind in (("", "weight"), ("_bias", "bias"))
)
_EXPERT_NORMS = {
    "shared_norm": "pre_feedforward_layernorm",
    "shared_post_norm": "post_feedforward_layernorm_1",
    "experts_norm": "pre_feedforward_layernorm_2",
    "experts_post_norm": "post_feedforward_layernorm_2",
}
_RULES = (
    *SANDWICH_RULES,
    *_HEADS,
    *expert_rules(at=f"{_LAYER}.", router="router.proj", shared="mlp"),
    rule("layers.{i}.mlp.expert_scale", f"{_LAYER}.router.per_expert_scale"),
    rule("layers.{i}.mlp.router_norm.weight", f"{_LAYER}.router.scale"),
    *(rule(f"layers.{{i}}.mlp.{norm}.weight", f"{_LAYER}.{name}.weight") for norm, name in _EXPERT_NORMS.items()),
    rule("layers.{i}.scalar", f"{_LAYER}.layer_scalar"),
    rule("layers.{i}.layer_input.gate", f"{_LAYER}.per_layer_input_gate.weight"),
    rule("layers.{i}.layer_input.out", f"{_LAYER}.per_layer_projection.weight"),
    rule("layers.{i}.layer_input.norm.weight", f"{_LAYER}.post_per_layer_input_norm.weight"),
    rule("layer_inputs.weight", "model.embed_tokens_per_layer.weight", transform=TOKEN_ROWS),
    rule("layer_inputs.projection", "model.per_layer_model_projection.weight"),
    rule("layer_inputs.norm.weight", "model.per_layer_projection_norm.weight"),
)

# Projections of layers that read the keys and values of another.
_IGNORED = (*IGNORED, r"model\.layers\.({sharing})\.self_attn\.[kv]_(proj|norm)\..*")

GEMMA4 = Family("Gemma4ForCausalLM", _spec, _RULES, prefix="model.", ignored=_IGNORED, float16=False)
GEMMA4_TEXT_HALF = text_half(
    GEMMA4,
    "Gemma4ForConditionalGeneration",
    defaults={},
    harmless=(
        "audio_token_id", "boa_token_id", "boi_token_id", "eoa_token_id", "eoa_token_index", "eoi_token_id", "image_token_id",
        "video_token_id", "vision_soft_tokens_per_image",
    ),
)  # fmt: skip
