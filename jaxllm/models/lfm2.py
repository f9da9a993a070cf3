"""LFM2: gated short convolutions, with attention between, and experts in the larger ones."""

from __future__ import annotations

from dataclasses import replace

from jaxllm.errors import ModelLoadError
from jaxllm.models.experts import TRAINING_KEYS, expert_rules, with_experts
from jaxllm.models.family import Family
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.llama import IGNORED, llama_like
from jaxllm.models.names import decoder_rules
from jaxllm.models.state_names import short_conv_rules
from jaxllm.specs import BlockSpec, DecoderSpec, MLPSpec, MoESpec, NormSpec, RouterSpec, ShortConvSpec


def _mlp_width(config: HFConfig) -> int:
    """The config's width is that of an MLP without a gate: with one, two thirds of it, rounded up."""
    width = config.size("block_ff_dim", config.get("intermediate_size", 12288))
    multiplier, multiple = config.get("block_ffn_dim_multiplier", 1.0), config.size("block_multiple_of", 256)
    if not config.flag("block_auto_adjust_ff_dim", True):
        return width
    return -(-int(multiplier * int(2 * width / 3)) // multiple) * multiple


def _layer_types(config: HFConfig) -> list[str]:
    layers = config.size("num_hidden_layers")
    attention = config.get("full_attn_idxs", list(range(layers)))
    types = config.get("layer_types", ["full_attention" if i in attention else "conv" for i in range(layers)])
    unknown = set(types) - {"full_attention", "conv"}
    if unknown or len(types) != layers:
        raise ModelLoadError(f"config.json: layer_types must be full_attention or conv for each of {layers} layers, got {types}")
    return types


def _spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    return _decoder(config, max_model_len, _mlp_width(config))


def _moe_spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    router = RouterSpec(
        config.size("num_experts", 32),
        config.size("num_experts_per_tok", 4),
        scores="sigmoid",
        normalised=config.flag("norm_topk_prob", True),
        correction=config.flag("use_expert_bias", True),
        scale=config.number("routed_scaling_factor", 1.0),
    )
    moe, first = MoESpec(router, MLPSpec(config.size("moe_intermediate_size"), "silu")), config.get("num_dense_layers", 2)
    return with_experts(_decoder(config, max_model_len, config.size("intermediate_size")), moe, lambda layer: layer >= first)


def _decoder(config: HFConfig, max_model_len: int | None, mlp_width: int) -> DecoderSpec:
    width = config.size("hidden_size")
    norm = NormSpec("rms", config.number("norm_eps", 1e-5))
    spec = llama_like(
        config,
        max_model_len,
        default_positions=128000,
        default_theta=config.number("theta", 1e6),
        norm=norm,
        qk_norm=True,
        activation="silu",
        mlp_width=mlp_width,
        tied=True,
    )
    conv = ShortConvSpec(width, config.size("conv_L_cache", 3), config.flag("conv_bias", False))

    def block(block: BlockSpec, kind: str) -> BlockSpec:
        return block if kind == "full_attention" else replace(block, mixer=None, recurrent=conv)

    blocks = tuple(block(*pair) for pair in zip(spec.blocks, _layer_types(config), strict=True))
    tied = config.flag("tie_embedding", spec.tied_head)
    return replace(spec, blocks=blocks, tied_head=tied)


_RULES = (
    *decoder_rules(
        attention_norm="operator_norm",
        q_norm="self_attn.q_layernorm",
        k_norm="self_attn.k_layernorm",
        out="self_attn.out_proj",
        mlp_norm="ffn_norm",
        gate_up=("feed_forward.w1", "feed_forward.w3"),
        down="feed_forward.w2",
        final_norm="embedding_norm",
    ),
    *short_conv_rules("model.layers.{i}.conv"),
)
# The widths and counts of an earlier spelling, which others repeat.
_HARMLESS = ("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_swiglu", "block_use_xavier_init",
             "conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads", "use_pos_enc")  # fmt: skip

_EXPERTS = expert_rules(at="model.layers.{i}.feed_forward.", correction="expert_bias", each=("w1", "w3", "w2"))

LFM2 = Family("Lfm2ForCausalLM", _spec, _RULES, prefix="model.", ignored=IGNORED, harmless_keys=_HARMLESS)
LFM2_MOE = replace(
    LFM2, architecture="Lfm2MoeForCausalLM", to_spec=_moe_spec, rules=(*_RULES, *_EXPERTS), harmless_keys=(*_HARMLESS, *TRAINING_KEYS)
)
