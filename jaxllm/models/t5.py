"""T5 and Flan-T5: an encoder and a decoder with a learned bias for distances instead of positions, and unscaled attention."""

from __future__ import annotations

from typing import Any

from jaxllm.models.family import Family
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.names import decoder_rules
from jaxllm.specs import AttendSpec, AttentionSpec, BlockSpec, DecoderSpec, MLPSpec, NormSpec, RelativeSpec
from jaxllm.weights.rules import Rule, Source, rule
from jaxllm.weights.transforms import TOKEN_ROWS

# (activation, gated) by feed_forward_proj; the original's "gelu" of gates is the approximation.
_FEED_FORWARDS = {"relu": ("relu", False), "gelu": ("gelu", False), "gated-gelu": ("gelu_tanh", True), "gated-silu": ("silu", True)}


def _spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    width, heads, dim = config.size("d_model", 512), config.size("num_heads", 8), config.size("d_kv", 64)
    layers = config.size("num_layers", 6)
    relative = RelativeSpec(config.size("relative_attention_num_buckets", 32), config.size("relative_attention_max_distance", 128))
    # Biases have no end; this is what the released models were trained with.
    positions = config.size("n_positions", 512)
    norm = NormSpec("rms", config.number("layer_norm_epsilon", 1e-6))
    activation, gated = config.choice("feed_forward_proj", _FEED_FORWARDS, "relu")
    mlp = MLPSpec(config.size("d_ff", 2048), activation, gated=gated)
    config.expect("is_encoder_decoder", True)
    # A tied head goes with scaled outputs; later versions of transformers write only whether these are.
    tied = config.flag("scale_decoder_outputs", config.flag("tie_word_embeddings", True))

    def attention(**fields: Any) -> AttentionSpec:
        cross = "window" in fields
        return AttentionSpec(heads, heads, dim, AttendSpec(1.0, relative=None if cross else relative, **fields), cross=cross)

    def stack(block: BlockSpec, count: int, **fields: Any) -> DecoderSpec:
        return DecoderSpec(
            width=width,
            vocab_size=config.size("vocab_size", 32128),
            blocks=(block,) * count,
            final_norm=norm,
            max_positions=positions,
            **fields,
        )

    return stack(
        BlockSpec(attention(), mlp, norm, cross=attention(window=positions, causal=False)),
        config.size("num_decoder_layers", layers),
        tied_head=tied,
        logit_scale=width**-0.5 if tied else 1.0,
        encoder=stack(BlockSpec(attention(causal=False), mlp, norm), layers, tied_head=True),
    )


def _rules(stack: str, mlp: str) -> tuple[Rule, ...]:
    table = Source(f"{stack}block.0.layer.0.SelfAttention.relative_attention_bias.weight", transposed=True)
    names = decoder_rules(
        decoder=stack, layer="block.{i}.", attention_norm="layer.0.layer_norm", qkv=tuple(f"layer.0.SelfAttention.{x}" for x in "qkv"),
        out="layer.0.SelfAttention.o", cross=tuple(f"layer.1.EncDecAttention.{x}" for x in "qkvo"), cross_norm="layer.1.layer_norm",
        mlp_norm=f"{mlp}.layer_norm", gate_up=(f"{mlp}.DenseReluDense.wi_0", f"{mlp}.DenseReluDense.wi_1"),
        up=f"{mlp}.DenseReluDense.wi", down=f"{mlp}.DenseReluDense.wo", final_norm="final_layer_norm",
    )  # fmt: skip
    return (rule("embed.weight", "shared.weight", transform=TOKEN_ROWS), rule("relative_bias.weight", table), *names)


T5 = Family(
    "T5ForConditionalGeneration",
    _spec,
    _rules("decoder.", "layer.2"),
    prefix="",
    encoder_rules=_rules("encoder.", "layer.1"),
    # The shared table once more, and a bias that no member reads.
    ignored=(r"(en|de)coder\.embed_tokens\.weight", r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"),
    harmless_keys=("dropout_rate", "dense_act_fn", "is_gated_act", "tie_encoder_decoder"),
    # Its residuals grow beyond it.
    float16=False,
)
