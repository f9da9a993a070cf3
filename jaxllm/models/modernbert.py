"""ModernBERT: norms before each part, gated feed-forwards, and most layers seeing only what is around a token."""

from __future__ import annotations

from jaxllm.models.family import ACTIVATIONS, Family, layer_windows
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.names import decoder_rules
from jaxllm.models.rope import read_rope, rope_spec
from jaxllm.specs import AttendSpec, AttentionSpec, BlockSpec, DecoderSpec, MLPSpec, NormSpec, RopeSpec
from jaxllm.weights.transforms import JOINED_QKV


def _spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    """Norms before each part and none with a bias, gated feed-forwards, two layers that see `local_attention` around for each that sees
    everything, with a rope of its own for each kind (Warner et al., 2024, arXiv:2412.13663).
    """
    for name in ("tie_word_embeddings", "decoder_bias", "classifier_pooling", "classifier_bias", "classifier_activation"):
        config.get(name)
    width, heads = config.size("hidden_size"), config.size("num_attention_heads")
    positions = config.size("max_position_embeddings", 8192)
    every = config.size("global_attn_every_n_layers", 3)
    # Half to each side, and the token itself.
    windows = layer_windows(config, config.size("local_attention", 128) // 2 + 1, default=lambda layer: layer % every != 0)
    nested, scaling = config.get("rope_parameters", {}), config.get("rope_scaling", {})

    def rope(kind: str, key: str, theta: float) -> RopeSpec:
        values = {**scaling, **nested.get(kind, {})}
        parameters = read_rope(config, max_positions=positions, default_theta=config.number(key, theta), values=values)
        return rope_spec(parameters, width // heads, max_model_len or positions)

    full, around = rope("full_attention", "global_rope_theta", 160000.0), rope("sliding_attention", "local_rope_theta", 10000.0)
    norm = NormSpec("layer", config.number("norm_eps", 1e-5), bias=config.flag("norm_bias", False))
    bias, dim = config.flag("attention_bias", False), width // heads
    mlp = MLPSpec(
        config.size("intermediate_size"), config.choice("hidden_activation", ACTIVATIONS, "gelu"), bias=config.flag("mlp_bias", False)
    )

    def block(layer: int) -> BlockSpec:
        attend = AttendSpec(dim**-0.5, windows[layer], causal=False)
        attention = AttentionSpec(heads, heads, dim, attend, around if windows[layer] else full, qkv_bias=bias, out_bias=bias)
        # The embeddings are normalised already.
        return BlockSpec(attention, mlp, norm, "pre" if layer else "pre_mlp")

    return DecoderSpec(
        width=width,
        vocab_size=config.size("vocab_size"),
        blocks=tuple(block(i) for i in range(len(windows))),
        final_norm=norm,
        tied_head=True,
        max_positions=positions,
        embedding_norm=norm,
    )


MODERNBERT = Family(
    "ModernBertModel",
    _spec,
    decoder_rules(
        embed="embeddings.tok_embeddings",
        embed_norm="embeddings.norm",
        attention_norm="attn_norm",
        qkv=("attn.Wqkv",),
        fuse=JOINED_QKV,
        out="attn.Wo",
        mlp_norm="mlp_norm",
        gate_up=("mlp.Wi",),
        down="mlp.Wo",
        final_norm="final_norm",
    ),
    prefix="model.",
    ignored=(r"head\..*", r"decoder\..*", r"classifier\..*"),
    harmless_keys=(
        "initializer_cutoff_factor", "embedding_dropout", "mlp_dropout", "deterministic_flash_attn", "sparse_prediction",
        "sparse_pred_ignore_index", "reference_compile", "repad_logits_with_grad", "layer_norm_eps", "position_embedding_type",
    ),
)  # fmt: skip
