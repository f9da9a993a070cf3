"""GPT-2: learned positions, layer norm, a plain MLP; checkpoints keep projections as [in, out]."""

from __future__ import annotations

from jaxllm.errors import ModelLoadError
from jaxllm.models.family import ACTIVATIONS, Family
from jaxllm.models.hf_config import HFConfig
from jaxllm.specs import AttendSpec, AttentionSpec, BlockSpec, DecoderSpec, MLPSpec, NormSpec
from jaxllm.weights.rules import Source, rule
from jaxllm.weights.transforms import FUSE_QKV, SPLIT_INPUTS, TOKEN_ROWS


def _spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    width, heads, num_layers = config.size("n_embd"), config.size("n_head"), config.size("n_layer")
    if width % heads:
        raise ModelLoadError(f"config.json: n_embd={width} must be a multiple of n_head={heads}")
    norm = NormSpec("layer", config.number("layer_norm_epsilon", 1e-5))
    mlp = MLPSpec(
        width=config.size("n_inner", 4 * width),
        activation=config.choice("activation_function", ACTIVATIONS, "gelu_new"),
        gated=False,
        bias=True,
    )
    head_dim = width // heads
    scale = head_dim**-0.5 if config.flag("scale_attn_weights", True) else 1.0
    by_layer = config.flag("scale_attn_by_inverse_layer_idx", False)

    def block(layer: int) -> BlockSpec:
        attend = AttendSpec(scale=scale / (layer + 1) if by_layer else scale)
        return BlockSpec(AttentionSpec(heads, heads, head_dim, attend, qkv_bias=True, out_bias=True), mlp, norm)

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


_LAYER = "transformer.h.{i}"


def _qkv(kind: str) -> tuple[Source, ...]:
    return tuple(Source(f"{_LAYER}.attn.c_attn.{kind}", transposed=kind == "weight", part=part, parts=3) for part in range(3))


_RULES = (
    rule("embed.weight", "transformer.wte.weight", transform=TOKEN_ROWS),
    rule("embed.positions", "transformer.wpe.weight"),
    rule("layers.{i}.attention_norm.weight", f"{_LAYER}.ln_1.weight"),
    rule("layers.{i}.attention_norm.bias", f"{_LAYER}.ln_1.bias"),
    rule("layers.{i}.attention.qkv", *_qkv("weight"), transform=FUSE_QKV),
    rule("layers.{i}.attention.qkv_bias", *_qkv("bias"), transform=FUSE_QKV),
    rule("layers.{i}.attention.out", Source(f"{_LAYER}.attn.c_proj.weight", transposed=True), transform=SPLIT_INPUTS),
    rule("layers.{i}.attention.out_bias", f"{_LAYER}.attn.c_proj.bias"),
    rule("layers.{i}.mlp_norm.weight", f"{_LAYER}.ln_2.weight"),
    rule("layers.{i}.mlp_norm.bias", f"{_LAYER}.ln_2.bias"),
    rule("layers.{i}.mlp.up", Source(f"{_LAYER}.mlp.c_fc.weight", transposed=True)),
    rule("layers.{i}.mlp.up_bias", f"{_LAYER}.mlp.c_fc.bias"),
    rule("layers.{i}.mlp.down", Source(f"{_LAYER}.mlp.c_proj.weight", transposed=True)),
    rule("layers.{i}.mlp.down_bias", f"{_LAYER}.mlp.c_proj.bias"),
    rule("final_norm.weight", "transformer.ln_f.weight"),
    rule("final_norm.bias", "transformer.ln_f.bias"),
    rule("head.weight", "lm_head.weight", transform=TOKEN_ROWS),
)
# Causal masks that old checkpoints stored.
_IGNORED = (r".*\.attn\.(bias|masked_bias)",)

# The order of operations, heads of other tasks, and the length of training examples.
_HARMLESS = (
    "reorder_and_upcast_attn", "n_ctx", "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels",
    "summary_first_dropout",
)  # fmt: skip

GPT2 = Family("GPT2LMHeadModel", _spec, _RULES, prefix="transformer.", ignored=_IGNORED, harmless_keys=_HARMLESS)
