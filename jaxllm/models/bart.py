"""BART: an encoder and a decoder with learned positions from row 2 on and norms behind each residual."""

from __future__ import annotations

from typing import Any

from jaxllm.errors import ModelLoadError
from jaxllm.models.family import ACTIVATIONS, Family
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.names import decoder_rules
from jaxllm.specs import AttendSpec, AttentionSpec, BlockSpec, DecoderSpec, MLPSpec, NormSpec
from jaxllm.weights.rules import Rule, rule
from jaxllm.weights.transforms import TOKEN_ROW, TOKEN_ROWS


def _spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    width, positions = config.size("d_model", 1024), config.size("max_position_embeddings", 1024)
    norm = NormSpec("layer", 1e-5)
    for key in ("is_encoder_decoder", "normalize_embedding"):
        config.expect(key, True)
    # Of its relatives (mBART, Pegasus, Marian), which have architectures of their own.
    for key in ("normalize_before", "add_final_layer_norm", "add_bias_logits", "static_position_embeddings"):
        config.expect(key, False)
    config.expect("extra_pos_embeddings", 2)

    def stack(half: str, **fields: Any) -> DecoderSpec:
        heads = config.size(f"{half}_attention_heads", 16)
        if width % heads:
            raise ModelLoadError(f"config.json: d_model={width} must be a multiple of {half}_attention_heads={heads}")

        def attention(**fields: Any) -> AttentionSpec:
            attend = AttendSpec((width // heads) ** -0.5, **fields)
            return AttentionSpec(heads, heads, width // heads, attend, qkv_bias=True, out_bias=True, cross="window" in fields)

        decodes = half == "decoder"
        activation = config.choice("activation_function", ACTIVATIONS, "gelu")
        block = BlockSpec(
            attention(causal=decodes),
            MLPSpec(config.size(f"{half}_ffn_dim", 4096), activation, gated=False, bias=True),
            norm,
            "post",
            cross=attention(window=positions, causal=False) if decodes else None,
        )
        return DecoderSpec(
            width=width,
            vocab_size=config.size("vocab_size", 50265),
            blocks=(block,) * config.size(f"{half}_layers", 12),
            final_norm=None,
            max_positions=positions,
            embedding_scale=width**0.5 if config.flag("scale_embedding", False) else None,
            embedding_norm=norm,
            learned_positions=positions,
            position_offset=2,
            **fields,
        )

    tied = config.flag("tie_word_embeddings", True)
    return stack("decoder", tied_head=tied, head_bias=True, encoder=stack("encoder", tied_head=True))


def _rules(stack: str) -> tuple[Rule, ...]:
    attention_norm = "self_attn_layer_norm"
    names = decoder_rules(
        decoder=stack, positions="embed_positions", embed_norm="layernorm_embedding", out="self_attn.out_proj",
        attention_post_norm=attention_norm, cross=tuple(f"encoder_attn.{x}_proj" for x in ("q", "k", "v", "out")),
        cross_norm="encoder_attn_layer_norm", up="fc1", down="fc2", mlp_post_norm="final_layer_norm",
    )  # fmt: skip
    shared = rule("embed.weight", "model.shared.weight", transform=TOKEN_ROWS)
    return (shared, rule("head_bias", "final_logits_bias", transform=TOKEN_ROW), *names)


BART = Family(
    "BartForConditionalGeneration",
    _spec,
    _rules("model.decoder."),
    prefix="model.",
    encoder_rules=_rules("model.encoder."),
    # The shared table once more.
    ignored=(r"model\.(en|de)coder\.embed_tokens\.weight",),
    harmless_keys=(
        "activation_dropout", "dropout", "encoder_layerdrop", "decoder_layerdrop", "init_std", "classif_dropout", "num_hidden_layers",
        "force_bos_token_to_be_generated", "eos_token_ids", "add_cross_attention", "replacing_rate", "save_step",
    ),
)  # fmt: skip
