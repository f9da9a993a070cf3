"""Nemotron-H: each layer is one of Mamba 2, attention without positions, and feed-forwards without gates, plain or of experts."""

from __future__ import annotations

from dataclasses import replace

from jaxllm.errors import ModelLoadError
from jaxllm.models.experts import TRAINING_KEYS, expert_rules
from jaxllm.models.family import ACTIVATIONS, Family, head_sizes
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.mamba import HARMLESS, dt_limits
from jaxllm.models.state_names import mamba2_rules
from jaxllm.specs import AttendSpec, AttentionSpec, BlockSpec, DecoderSpec, Mamba2Spec, MLPSpec, MoESpec, NormSpec, RouterSpec
from jaxllm.weights.rules import rule
from jaxllm.weights.transforms import FUSE_QKV, TOKEN_ROWS

_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_TYPES = {"linear_attention": "mamba", "full_attention": "attention", **{kind: kind for kind in _LETTERS.values()}}


def _kinds(config: HFConfig) -> list[str]:
    """What each layer is; a string with a letter a layer in older configs."""
    layers, pattern = config.get("num_hidden_layers"), config.get("hybrid_override_pattern")
    types = config.get("layers_block_type", config.get("layer_types", list(pattern) if pattern else None))
    if types is None or (layers is not None and layers != len(types)):
        raise ModelLoadError("config.json: layers_block_type or hybrid_override_pattern must say what each of num_hidden_layers layers is")
    known = _TYPES | _LETTERS
    if set(types) - known.keys():
        raise ModelLoadError(f"config.json: layers of {', '.join(sorted(set(types) - known.keys()))}; supported: {', '.join(known)}")
    return [known[kind] for kind in types]


def _spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    if any(config.flag(key, False) for key in ("attention_bias", "use_bias")) or config.get("sliding_window"):
        raise ModelLoadError("config.json: attention_bias, use_bias and sliding_window are not supported for this architecture")
    norm = NormSpec("rms", config.number("layer_norm_epsilon", 1e-5))
    heads, head_dim = config.size("mamba_num_heads", 128), config.size("mamba_head_dim", 64)
    groups = config.size("n_groups", 8)
    config.get("expand")  # said by heads and their dim
    mamba = Mamba2Spec(
        num_heads=heads,
        head_dim=head_dim,
        num_groups=groups,
        state_size=config.size("ssm_state_size", 128),
        conv_width=config.size("conv_kernel", 4),
        activation=config.choice("mamba_hidden_act", ACTIVATIONS, "silu"),
        bias=config.flag("mamba_proj_bias", False),
        conv_bias=config.flag("use_conv_bias", True),
        dt_limits=dt_limits(config),
        norm=norm,
        norm_each=groups > 1,
    )
    query_heads, kv_heads, _ = head_sizes(config)
    dim = config.size("head_dim", config.get("attention_head_dim", 128))
    attention = AttentionSpec(query_heads, kv_heads, dim, AttendSpec(dim**-0.5))
    mlp = MLPSpec(
        config.size("intermediate_size"),
        config.choice("mlp_hidden_act", ACTIVATIONS, "relu2"),
        gated=False,
        bias=config.flag("mlp_bias", False),
    )
    kinds = _kinds(config)
    blocks = {
        "mamba": BlockSpec(None, None, norm, recurrent=mamba),
        "attention": BlockSpec(attention, None, norm),
        "mlp": BlockSpec(None, mlp, norm),
    }
    if "moe" in kinds:
        blocks["moe"] = BlockSpec(None, _experts(config, mlp), norm)
    return DecoderSpec(
        width=config.size("hidden_size"),
        vocab_size=config.size("vocab_size"),
        blocks=tuple(blocks[kind] for kind in kinds),
        final_norm=norm,
        tied_head=config.flag("tie_word_embeddings", False),
        max_positions=config.size("max_position_embeddings", 4096),
    )


def _experts(config: HFConfig, mlp: MLPSpec) -> MoESpec:
    config.expect("moe_latent_size", None)
    config.expect("n_shared_experts", 1)
    router = RouterSpec(
        config.size("n_routed_experts", 8),
        config.size("num_experts_per_tok", 2),
        scores="sigmoid",
        normalised=config.flag("norm_topk_prob", True),
        correction=True,
        groups=config.size("n_group", 1),
        top_groups=config.size("topk_group", 1),
        group_top=2,
        scale=config.number("routed_scaling_factor", 1.0),
    )
    expert, shared = (config.size(key) for key in ("moe_intermediate_size", "moe_shared_expert_intermediate_size"))
    return MoESpec(router, replace(mlp, width=expert), shared=replace(mlp, width=shared))


_LAYER, _PARAM = "backbone.layers.{i}", "layers.{i}"
_RULES = (
    rule("embed.weight", "backbone.embeddings.weight", transform=TOKEN_ROWS),
    *(rule(f"{_PARAM}.{norm}.weight", f"{_LAYER}.norm.weight") for norm in ("attention_norm", "mlp_norm")),
    *mamba2_rules(f"{_LAYER}.mixer"),
    rule(f"{_PARAM}.attention.qkv", *(f"{_LAYER}.mixer.{x}_proj.weight" for x in "qkv"), transform=FUSE_QKV),
    rule(f"{_PARAM}.attention.out", f"{_LAYER}.mixer.o_proj.weight"),
    *(rule(f"{_PARAM}.mlp.{x}", f"{_LAYER}.mixer.{x}_proj.weight") for x in ("up", "down")),
    *(rule(f"{_PARAM}.mlp.{x}_bias", f"{_LAYER}.mixer.{x}_proj.bias") for x in ("up", "down")),
    *expert_rules(
        at=f"{_LAYER}.mixer.",
        each=("up_proj", "down_proj"),
        stacked=("experts.up_proj", "experts.down_proj"),
        shared="shared_experts",
    ),
    rule("final_norm.weight", "backbone.norm_f.weight"),
    rule("head.weight", "lm_head.weight", transform=TOKEN_ROWS),
)
# The rotation is not used; keys of experts are there where no layer has any.
_HARMLESS = (
    *HARMLESS, *TRAINING_KEYS, "partial_rotary_factor", "rope_theta", "norm_eps", "rms_norm_eps", "mamba_ssm_cache_dtype",
    "num_query_groups", "mlp_bias", "moe_shared_expert_overlap", "num_nextn_predict_layers", "mtp_layers_block_type",
    "mtp_hybrid_override_pattern", "n_routed_experts", "n_shared_experts", "moe_intermediate_size", "moe_shared_expert_intermediate_size",
    "moe_latent_size", "num_experts_per_tok", "routed_scaling_factor", "n_group", "topk_group", "norm_topk_prob",
)  # fmt: skip

NEMOTRON_H = Family(
    "NemotronHForCausalLM",
    _spec,
    _RULES,
    prefix="backbone.",
    ignored=(r"mtp\..*",),
    renamed=((r"model\.", "backbone."), (r"backbone\.embedding\.", "backbone.embeddings.")),
    harmless_keys=_HARMLESS,
)
