"""GPT-2 (learned positions, layer norms, checkpoints that keep projections as [in, out]) and GPTBigCode (one key head for all)."""

from __future__ import annotations

from typing import Any

from jaxllm.errors import ModelLoadError
from jaxllm.models.family import ACTIVATIONS, Family
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.names import decoder_rules
from jaxllm.specs import AttendSpec, AttentionSpec, BlockSpec, DecoderSpec, MLPSpec, NormSpec
from jaxllm.weights.transforms import GROUPED_QKV, JOINED_QKV


def _spec(config: HFConfig, max_model_len: int | None, kv_heads: int | None = None, activation: str = "gelu_new") -> DecoderSpec:
    width, heads, num_layers = config.size("n_embd"), config.size("n_head"), config.size("n_layer")
    if width % heads:
        raise ModelLoadError(f"config.json: n_embd={width} must be a multiple of n_head={heads}")
    norm = NormSpec("layer", config.number("layer_norm_epsilon", 1e-5))
    mlp = MLPSpec(
        width=config.size("n_inner", 4 * width),
        activation=config.choice("activation_function", ACTIVATIONS, activation),
        gated=False,
        bias=True,
    )
    head_dim = width // heads
    scale = head_dim**-0.5 if config.flag("scale_attn_weights", True) else 1.0
    by_layer = config.flag("scale_attn_by_inverse_layer_idx", False)

    def block(layer: int) -> BlockSpec:
        attend = AttendSpec(scale=scale / (layer + 1) if by_layer else scale)
        return BlockSpec(AttentionSpec(heads, kv_heads or heads, head_dim, attend, qkv_bias=True, out_bias=True), mlp, norm)

    positions = config.size("n_positions", 1024)
    return DecoderSpec(
        width=width,
        vocab_size=config.size("vocab_size"),
        blocks=tuple(block(i) for i in range(num_layers)),
        final_norm=norm,
        tied_head=config.flag("tie_word_embeddings", True),
        max_positions=positions,
        learned_positions=positions,
    )


def _bigcode_spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    kv_heads = 1 if config.flag("multi_query", True) else None
    config.expect("num_key_value_heads", kv_heads or config.size("n_head"))
    return _spec(config, max_model_len, kv_heads, "gelu_pytorch_tanh")


_NAMES: dict[str, Any] = {
    "decoder": "transformer.", "layer": "h.{i}.", "embed": "wte", "positions": "wpe", "attention_norm": "ln_1", "qkv": ("attn.c_attn",),
    "out": "attn.c_proj", "mlp_norm": "ln_2", "up": "mlp.c_fc", "down": "mlp.c_proj", "final_norm": "ln_f",
}  # fmt: skip
_RULES = decoder_rules(**_NAMES, fuse=JOINED_QKV, transposed=True)
# Causal masks that old checkpoints stored.
_IGNORED = (r".*\.attn\.(bias|masked_bias)",)

# The order of operations, heads of other tasks, and the length of training examples.
_HARMLESS = (
    "reorder_and_upcast_attn", "n_ctx", "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels",
    "summary_first_dropout", "n_special", "predict_special_tokens",
)  # fmt: skip

GPT2 = Family("GPT2LMHeadModel", _spec, _RULES, prefix="transformer.", ignored=_IGNORED, harmless_keys=_HARMLESS)
GPT_BIGCODE = Family(
    "GPTBigCodeForCausalLM",
    _bigcode_spec,
    decoder_rules(**_NAMES, fuse=GROUPED_QKV),
    prefix="transformer.",
    ignored=_IGNORED,
    # How the reference's kernels and caches work.
    harmless_keys=(
        *_HARMLESS, "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "inference_runner", "pad_key_length",
        "pre_allocate_kv_cache", "validate_runner_input", "max_batch_size", "max_sequence_length",
    ),
)  # fmt: skip
