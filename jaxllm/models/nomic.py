"""NomicBERT: BERT with rotated heads and gated feed-forwards; its config has the keys of its first release (GPT-2's) or transformers'."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxllm.models.bert import IGNORED, RENAMED, encoder_rules
from jaxllm.models.family import Family, change_attend
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.llama import llama_like
from jaxllm.specs import DecoderSpec, NormSpec
from jaxllm.weights.transforms import JOINED_QKV


def _spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    """BERT with rotated heads and a gated feed-forward, without biases (Nussbaum et al., 2024, arXiv:2402.01613)."""
    if config.get("n_embd") is not None:
        config = _in_other_words(config)
    norm = NormSpec("layer", config.number("layer_norm_eps", 1e-12))
    spec = llama_like(config, max_model_len, default_positions=2048, default_theta=1000.0, norm=norm, placement="post", tied=True)
    spec = replace(spec, final_norm=None, embedding_norm=norm, token_types=config.size("type_vocab_size", 2))
    return change_attend(spec, causal=False)


def _in_other_words(config: HFConfig) -> HFConfig:
    """The config of the first release, which had GPT-2's keys, in those of transformers."""
    for name in ("prenorm", "parallel_block", "causal", "qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "use_rms_norm"):
        config.expect(name, False)
    config.expect("rotary_emb_interleaved", False)
    config.expect("rotary_emb_fraction", 1.0)
    config.expect("rotary_emb_scale_base", None)
    config.expect("rotary_scaling_factor", 1.0)
    config.expect("activation_function", "swiglu")
    config.expect("scale_attn_weights", True)
    config.expect("scale_attn_by_inverse_layer_idx", False)
    config.expect("moe_every_n_layers", 0)
    positions = config.size("n_positions", 2048)
    values = {
        "vocab_size": config.size("vocab_size"),
        "hidden_size": config.size("n_embd"),
        "num_attention_heads": config.size("n_head"),
        "num_hidden_layers": config.size("n_layer"),
        "intermediate_size": config.size("n_inner"),
        "max_position_embeddings": config.size("max_trained_positions", positions),
        "type_vocab_size": config.size("type_vocab_size", 2),
        "layer_norm_eps": config.number("layer_norm_epsilon", 1e-12),
        "rope_theta": config.number("rotary_emb_base", 1000.0),
    }
    return HFConfig(values)


# Also what transformers writes, which has other names in memory. Gate and up are numbered after the order of the paper's formula.
_NAMES: dict[str, Any] = {
    "layer": "encoder.layers.{i}.",
    "embed": "embeddings.word_embeddings",
    "embed_norm": "emb_ln",
    "qkv": ("attn.Wqkv",),
    "fuse": JOINED_QKV,
    "out": "attn.out_proj",
    "attention_post_norm": "norm1",
    "gate_up": ("mlp.fc12", "mlp.fc11"),
    "down": "mlp.fc2",
    "mlp_post_norm": "norm2",
}
# Of the first release's config: training, heads of other models, and what is said twice.
_HARMLESS = (
    "embd_pdrop", "attn_pdrop", "resid_pdrop", "fused_bias_fc", "fused_dropout_add_ln", "use_flash_attn", "use_xentropy",
    "dense_seq_output", "pad_vocab_size_multiple", "summary_first_dropout", "summary_proj_to_labels", "summary_type",
    "summary_use_proj", "summary_activation", "last_layer_subset", "reorder_and_upcast_attn", "tie_word_embeddings", "n_positions",
)  # fmt: skip

NOMIC = Family(
    "NomicBertModel",
    _spec,
    encoder_rules("nomic_bert.", _NAMES),
    prefix="nomic_bert.",
    ignored=IGNORED,
    renamed=(*RENAMED, (r"bert\.", "nomic_bert.")),
    harmless_keys=_HARMLESS,
)
