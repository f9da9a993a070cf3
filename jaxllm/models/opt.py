"""OPT: learned positions from row 2 on; the 350M release has narrow embeddings and norms after the residual."""

from __future__ import annotations

from jaxllm.errors import ModelLoadError
from jaxllm.models.family import ACTIVATIONS, Family
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.names import decoder_rules
from jaxllm.specs import AttendSpec, AttentionSpec, BlockSpec, DecoderSpec, MLPSpec, NormSpec
from jaxllm.weights.rules import rule


def _spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    width, heads = config.size("hidden_size"), config.size("num_attention_heads")
    if width % heads:
        raise ModelLoadError(f"config.json: hidden_size={width} must be a multiple of num_attention_heads={heads}")
    bias, affine = config.flag("enable_bias", True), config.flag("layer_norm_elementwise_affine", True)
    before = config.flag("do_layer_norm_before", True)
    norm = NormSpec("layer", 1e-5, weight=affine, bias=affine)
    head_dim, embedding_width = width // heads, config.size("word_embed_proj_dim", width)
    positions = config.size("max_position_embeddings", 2048)
    block = BlockSpec(
        AttentionSpec(heads, heads, head_dim, AttendSpec(head_dim**-0.5), qkv_bias=bias, out_bias=bias),
        MLPSpec(config.size("ffn_dim"), config.choice("activation_function", ACTIVATIONS, "relu"), gated=False, bias=bias),
        norm,
        "pre" if before else "post",
    )
    return DecoderSpec(
        width=width,
        vocab_size=config.size("vocab_size"),
        blocks=(block,) * config.size("num_hidden_layers"),
        final_norm=norm if before and not config.flag("_remove_final_layer_norm", False) else None,
        tied_head=config.flag("tie_word_embeddings", True),
        max_positions=positions,
        embedding_width=embedding_width if embedding_width != width else None,
        learned_positions=positions,
        position_offset=2,
    )


_RULES = (
    *decoder_rules(
        decoder="model.decoder.", positions="embed_positions", attention_norm="self_attn_layer_norm", out="self_attn.out_proj",
        attention_post_norm="self_attn_layer_norm", mlp_norm="final_layer_norm", up="fc1", down="fc2", mlp_post_norm="final_layer_norm",
        final_norm="final_layer_norm",
    ),
    rule("embed.projection", "model.decoder.project_in.weight"),
    rule("head_projection", "model.decoder.project_out.weight"),
)  # fmt: skip

OPT = Family(
    "OPTForCausalLM",
    _spec,
    _RULES,
    prefix="model.",
    # The bare decoder is called `decoder`.
    renamed=((r"decoder\.", "model.decoder."),),
    harmless_keys=("activation_dropout", "dropout", "layerdrop", "init_std"),
)
