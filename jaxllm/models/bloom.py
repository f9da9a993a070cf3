"""Bloom and MPT: positions as linear biases of attention."""

from __future__ import annotations

from jaxllm.errors import ModelLoadError
from jaxllm.models.alibi import alibi_slopes, mpt_slopes
from jaxllm.models.family import Family
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.names import decoder_rules
from jaxllm.specs import AttendSpec, AttentionSpec, BlockSpec, DecoderSpec, MLPSpec, NormSpec
from jaxllm.weights.transforms import GROUPED_QKV, JOINED_QKV


def _bloom_spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    width = config.size("n_embed", config.size("hidden_size", config.get("n_embed")))
    heads = config.size("n_head", config.get("num_attention_heads"))
    config.expect("n_inner", 4 * width)
    head_dim = _head_dim(width, heads)
    norm = NormSpec("layer", config.number("layer_norm_epsilon", 1e-5))
    attend = AttendSpec(head_dim**-0.5, alibi=alibi_slopes(heads))
    block = BlockSpec(
        AttentionSpec(heads, heads, head_dim, attend, qkv_bias=True, out_bias=True),
        MLPSpec(4 * width, "gelu_tanh", gated=False, bias=True),
        norm,
    )
    return DecoderSpec(
        width=width,
        vocab_size=config.size("vocab_size"),
        blocks=(block,) * config.size("n_layer", config.get("num_hidden_layers")),
        final_norm=norm,
        tied_head=config.flag("tie_word_embeddings", True),
        # Biases have no end; this is what the released models were trained with.
        max_positions=config.size("seq_length", 2048),
        embedding_norm=norm,
    )


def _mpt_spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    width, heads = config.size("d_model"), config.size("n_heads")
    head_dim = _head_dim(width, heads)
    attn = HFConfig(config.get("attn_config", {}))
    if not attn.flag("alibi", True):
        raise ModelLoadError("config.json: attn_config.alibi=false is not supported for this architecture: its reference has no positions")
    attn.expect("attn_type", "multihead_attention")
    for key in ("no_bias", "alibi"):
        config.expect(key, True)
    config.expect("expansion_ratio", 4)
    norm = NormSpec("layer", config.number("layer_norm_epsilon", 1e-5), bias=False)
    scale = attn.optional_number("softmax_scale", None) or head_dim**-0.5
    # As the makers' own code reads it; transformers takes 8 whatever the config says.
    attend = AttendSpec(scale, alibi=mpt_slopes(heads, attn.number("alibi_bias_max", 8)))
    attention = AttentionSpec(heads, heads, head_dim, attend, clip=attn.optional_number("clip_qkv", None))
    # How attention is computed, not what.
    attn.refuse_unread("MptForCausalLM (attn_config)", ("attn_impl", "attn_pdrop"))
    return DecoderSpec(
        width=width,
        vocab_size=config.size("vocab_size"),
        blocks=(BlockSpec(attention, MLPSpec(4 * width, "gelu", gated=False), norm),) * config.size("n_layers"),
        final_norm=norm,
        tied_head=config.flag("tie_word_embeddings", True),
        max_positions=config.size("max_seq_len", 2048),
    )


def _head_dim(width: int, heads: int) -> int:
    if width % heads:
        raise ModelLoadError(f"config.json: width {width} must be a multiple of the {heads} attention heads")
    return width // heads


BLOOM = Family(
    "BloomForCausalLM",
    _bloom_spec,
    decoder_rules(
        decoder="transformer.", layer="h.{i}.", embed="word_embeddings", embed_norm="word_embeddings_layernorm",
        qkv=("self_attention.query_key_value",), fuse=GROUPED_QKV, out="self_attention.dense", up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h", final_norm="ln_f",
    ),
    prefix="transformer.",
    # How sums are rounded, and Megatron's options for training.
    harmless_keys=(
        "slow_but_exact", "attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion", "offset_alibi", "skip_bias_add",
    ),
)  # fmt: skip
MPT = Family(
    "MptForCausalLM",
    _mpt_spec,
    decoder_rules(
        decoder="transformer.", layer="blocks.{i}.", embed="wte", attention_norm="norm_1", qkv=("attn.Wqkv",), fuse=JOINED_QKV,
        out="attn.out_proj", mlp_norm="norm_2", up="ffn.up_proj", down="ffn.down_proj", final_norm="norm_f",
    ),
    prefix="transformer.",
    harmless_keys=(
        "emb_pdrop", "embedding_fraction", "init_config", "init_device", "learned_pos_emb", "norm_type", "tokenizer_name", "verbose",
    ),
)  # fmt: skip
