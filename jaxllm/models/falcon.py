"""Falcon: the 7B design (one key head, attention and MLP side by side), the 40B one (groups, two norms), and Falcon-RW (linear biases)."""

from __future__ import annotations

from jaxllm.errors import ModelLoadError
from jaxllm.models.alibi import alibi_slopes
from jaxllm.models.family import ACTIVATIONS, Family
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.names import decoder_rules
from jaxllm.models.rope import read_rope, rope_spec
from jaxllm.specs import AttendSpec, AttentionSpec, BlockSpec, DecoderSpec, MLPSpec, NormSpec, Placement, RopeSpec
from jaxllm.weights.transforms import GROUPED_QKV


def _spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    width, heads = config.size("hidden_size", config.get("n_embed")), config.size("num_attention_heads", config.get("n_head"))
    for key in ("n_embed", "n_head", "n_layer"):
        config.get(key)
    if width % heads:
        raise ModelLoadError(f"config.json: hidden_size={width} must be a multiple of num_attention_heads={heads}")
    head_dim, new = width // heads, config.flag("new_decoder_architecture", False)
    parallel, multi_query = config.flag("parallel_attn", True), config.flag("multi_query", True)
    kv_heads = config.size("num_kv_heads", config.get("n_head_kv", heads)) if new else 1 if multi_query else heads
    config.get("n_head_kv"), config.get("num_kv_heads")
    placement: Placement = "parallel_shared" if parallel else "pre"
    if new:
        norms = config.size("num_ln_in_parallel_attn", 2)
        placement = "parallel" if norms == 2 else "parallel_shared"
    positions = config.size("max_position_embeddings", 2048)
    norm, bias = NormSpec("layer", config.number("layer_norm_epsilon", 1e-5)), config.flag("bias", False)
    rope: RopeSpec | None = None
    slopes: tuple[float, ...] | None = None
    if config.flag("alibi", False):
        # Its biases are scaled as its scores are.
        config.get("rope_parameters"), config.get("rope_theta")
        slopes = tuple(slope * head_dim**-0.5 for slope in alibi_slopes(heads))
    else:
        parameters = read_rope(config, max_positions=positions)
        rope = rope_spec(parameters, head_dim, max_model_len or parameters.context_length())
        positions = parameters.context_length()
    mlp_width = config.size("ffn_hidden_size", 4 * width)
    config.expect("ff_factor", mlp_width / width)
    block = BlockSpec(
        AttentionSpec(heads, kv_heads, head_dim, AttendSpec(head_dim**-0.5, alibi=slopes), rope, qkv_bias=bias, out_bias=bias),
        MLPSpec(mlp_width, config.choice("activation", ACTIVATIONS, "gelu"), gated=False, bias=bias),
        norm,
        placement,
    )
    return DecoderSpec(
        width=width,
        vocab_size=config.size("vocab_size"),
        blocks=(block,) * config.size("num_hidden_layers", config.get("n_layer")),
        final_norm=norm,
        tied_head=config.flag("tie_word_embeddings", True),
        max_positions=positions,
    )


_RULES = decoder_rules(
    decoder="transformer.", layer="h.{i}.", embed="word_embeddings", qkv=("self_attention.query_key_value",), fuse=GROUPED_QKV,
    out="self_attention.dense", up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h", final_norm="ln_f",
)  # fmt: skip
# With two norms side by side they have names of their own.
_RENAMED = ((r"(.*\.h\.\d+)\.ln_attn\.", r"\1.input_layernorm."), (r"(.*\.h\.\d+)\.ln_mlp\.", r"\1.post_attention_layernorm."))

FALCON = Family(
    "FalconForCausalLM", _spec, _RULES, prefix="transformer.", renamed=_RENAMED, harmless_keys=("apply_residual_connection_post_layernorm",)
)
