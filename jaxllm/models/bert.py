"""BERT, RoBERTa, XLM-RoBERTa and DistilBERT: encoders whose attention sees all of a sequence, with norms behind each residual."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxllm.models.family import ACTIVATIONS, Family
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.names import decoder_rules
from jaxllm.specs import AttendSpec, AttentionSpec, BlockSpec, DecoderSpec, MLPSpec, NormSpec
from jaxllm.weights.rules import Rule, rule


def _bert_like(
    config: HFConfig,
    *,
    width: str = "hidden_size",
    heads: str = "num_attention_heads",
    layers: str = "num_hidden_layers",
    mlp: str = "intermediate_size",
    activation: str = "hidden_act",
    position_offset: int = 0,
    types: int = 2,
) -> DecoderSpec:
    """The spec of an encoder built like BERT; arguments are names of config keys, and what the config may not say."""
    config.expect("position_embedding_type", "absolute")
    # Whether the output embedding is the input one matters to masked language models only.
    config.get("tie_word_embeddings")
    # The flags that turn it into a decoder, of which there are no embedders.
    for name in ("is_decoder", "add_cross_attention"):
        config.expect(name, False)
    dim = config.size(width)
    num_heads = config.size(heads)
    norm = NormSpec("layer", config.number("layer_norm_eps", 1e-12))
    attend = AttendSpec(scale=(dim // num_heads) ** -0.5, causal=False)
    attention = AttentionSpec(num_heads, num_heads, dim // num_heads, attend, qkv_bias=True, out_bias=True)
    feed_forward = MLPSpec(config.size(mlp), config.choice(activation, ACTIVATIONS, "gelu"), gated=False, bias=True)
    positions = config.size("max_position_embeddings", 512) - position_offset
    return DecoderSpec(
        width=dim,
        vocab_size=config.size("vocab_size"),
        blocks=(BlockSpec(attention, feed_forward, norm, "post"),) * config.size(layers),
        final_norm=None,
        tied_head=True,
        max_positions=positions,
        embedding_norm=norm,
        learned_positions=positions,
        position_offset=position_offset,
        token_types=config.size("type_vocab_size", types) if types else 0,
    )


def _bert_spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    return _bert_like(config)


def _roberta_spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    # Positions count from the one behind the padding token's.
    config.expect("pad_token_id", 1)
    return _bert_like(config, position_offset=2)


def _distilbert_spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    # The table is stored, however it was made.
    config.get("sinusoidal_pos_embds")
    return _bert_like(config, width="dim", heads="n_heads", layers="n_layers", mlp="hidden_dim", activation="activation", types=0)


_BERT_NAMES: dict[str, Any] = {
    "layer": "encoder.layer.{i}.",
    "embed": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "embed_norm": "embeddings.LayerNorm",
    "qkv": tuple(f"attention.self.{x}" for x in ("query", "key", "value")),
    "out": "attention.output.dense",
    "attention_post_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "mlp_post_norm": "output.LayerNorm",
}
_DISTILBERT_NAMES = _BERT_NAMES | {
    "layer": "transformer.layer.{i}.",
    "qkv": tuple(f"attention.{x}_lin" for x in "qkv"),
    "out": "attention.out_lin",
    "attention_post_norm": "sa_layer_norm",
    "up": "ffn.lin1",
    "down": "ffn.lin2",
    "mlp_post_norm": "output_layer_norm",
}
# Heads, and positions as a tensor of their own. A model that has a head loads it.
IGNORED = (r"(.*\.)?position_ids", r"(cls|lm_head|vocab_\w+|classifier|pre_classifier)\..*", r"(.*\.)?pooler\..*")
# Of the first conversions.
RENAMED = ((r"(.*)LayerNorm\.gamma", r"\1LayerNorm.weight"), (r"(.*)LayerNorm\.beta", r"\1LayerNorm.bias"))


def encoder_rules(prefix: str, names: dict[str, Any]) -> tuple[Rule, ...]:
    """The rules of an encoder with segment embeddings, from the arguments of `decoder_rules`."""
    return (*decoder_rules(decoder=prefix, **names), rule("embed.types", f"{prefix}embeddings.token_type_embeddings.weight"))


def _family(
    stem: str,
    spec: Callable[[HFConfig, int | None], DecoderSpec],
    names: dict[str, Any] = _BERT_NAMES,
    *,
    prefix: str,
    harmless: tuple[str, ...] = (),
) -> Family:
    rules = encoder_rules(prefix, names)
    return Family(f"{stem}Model", spec, rules, prefix=prefix, ignored=IGNORED, renamed=RENAMED, harmless_keys=harmless)


# Of a head in the first implementation, which the config of its Chinese and multilingual releases describes.
_POOLER = ("directionality", "pooler_type", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head")
BERT = _family("Bert", _bert_spec, prefix="bert.", harmless=_POOLER)
ROBERTA = _family("Roberta", _roberta_spec, prefix="roberta.")
XLM_ROBERTA = _family("XLMRoberta", _roberta_spec, prefix="roberta.")
CAMEMBERT = _family("Camembert", _roberta_spec, prefix="roberta.")
_OF_TRAINING = ("dropout", "qa_dropout", "seq_classif_dropout", "tie_weights_")
DISTILBERT = _family("DistilBert", _distilbert_spec, _DISTILBERT_NAMES, prefix="distilbert.", harmless=_OF_TRAINING)
