"""GPT-NeoX (Pythia) and GPT-J: attention and MLP side by side, parts of each head rotated."""

from __future__ import annotations

from jaxllm.errors import ModelLoadError
from jaxllm.models.family import ACTIVATIONS, Family
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.llama import llama_like
from jaxllm.models.names import decoder_rules
from jaxllm.models.rope import RopeParameters, rope_spec
from jaxllm.specs import AttendSpec, AttentionSpec, BlockSpec, DecoderSpec, MLPSpec, NormSpec
from jaxllm.weights.transforms import GROUPED_QKV


def _neox_spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    bias = config.flag("attention_bias", True)
    return llama_like(
        config,
        max_model_len,
        default_positions=2048,
        default_theta=config.number("rotary_emb_base", 10000.0),
        partial=config.number("rotary_pct", 0.25),
        norm=NormSpec("layer", config.number("layer_norm_eps", 1e-5)),
        placement="parallel" if config.flag("use_parallel_residual", True) else "pre",
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=True,
        activation=None if config.get("hidden_act") else "gelu",
        gated=False,
    )


def _gptj_spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    width, heads, positions = config.size("n_embd"), config.size("n_head"), config.size("n_positions", 2048)
    if width % heads:
        raise ModelLoadError(f"config.json: n_embd={width} must be a multiple of n_head={heads}")
    for key in ("rotary", "scale_attn_weights"):
        config.expect(key, True)
    head_dim, norm = width // heads, NormSpec("layer", config.number("layer_norm_epsilon", 1e-5))
    rotated = config.size("rotary_dim", 64)
    rope = rope_spec(RopeParameters("default", 10000.0, {}, positions, positions), rotated, positions, interleaved=True)
    block = BlockSpec(
        AttentionSpec(heads, heads, head_dim, AttendSpec(head_dim**-0.5), rope),
        MLPSpec(config.size("n_inner", 4 * width), config.choice("activation_function", ACTIVATIONS, "gelu_new"), gated=False, bias=True),
        norm,
        "parallel_shared",
    )
    return DecoderSpec(
        width=width,
        vocab_size=config.size("vocab_size"),
        blocks=(block,) * config.size("n_layer"),
        final_norm=norm,
        tied_head=config.flag("tie_word_embeddings", False),
        max_positions=positions,
        head_bias=True,
    )


# Causal masks and frequencies that old checkpoints stored.
_IGNORED = (r".*\.(attention|attn)\.(bias|masked_bias|rotary_emb\.inv_freq)",)

GPT_NEOX = Family(
    "GPTNeoXForCausalLM",
    _neox_spec,
    decoder_rules(
        decoder="gpt_neox.", embed="embed_in", qkv=("attention.query_key_value",), fuse=GROUPED_QKV, out="attention.dense",
        up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h", final_norm="final_layer_norm",
    ),
    prefix="gpt_neox.",
    ignored=_IGNORED,
    renamed=((r"embed_out\.", "lm_head."),),
)  # fmt: skip
GPTJ = Family(
    "GPTJForCausalLM",
    _gptj_spec,
    decoder_rules(
        decoder="transformer.", layer="h.{i}.", embed="wte", attention_norm="ln_1", qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        out="attn.out_proj", up="mlp.fc_in", down="mlp.fc_out", final_norm="ln_f",
    ),
    prefix="transformer.",
    ignored=_IGNORED,
    harmless_keys=("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout"),
)  # fmt: skip
