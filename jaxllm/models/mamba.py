"""Mamba and Mamba 2: recurrent layers only."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from jaxllm.errors import ModelLoadError
from jaxllm.models.family import ACTIVATIONS, Family
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.state_names import mamba2_rules, mamba_rules
from jaxllm.specs import BlockSpec, DecoderSpec, Mamba2Spec, MambaSpec, NormSpec, RecurrentSpec
from jaxllm.weights.rules import Rule, rule
from jaxllm.weights.transforms import TOKEN_ROWS

# A state has no longest sequence; page tables and the like want one.
POSITIONS = 131072
# How parameters were drawn before training, which implementation computes, and in how large pieces.
HARMLESS = (
    "time_step_scale",
    "time_step_rank",
    "time_step_min",
    "time_step_max",
    "time_step_floor",
    "time_step_init_scheme",
    "rescale_prenorm_residual",
    "residual_in_fp32",
    "chunk_size",
    "mamba_chunk_size",
    "use_mambapy",
    "use_associative_scan",
    "use_mamba_kernels",
    "num_logits_to_keep",
    "calc_logits_for_entire_prompt",
)


def _decoder(config: HFConfig, recurrent: RecurrentSpec, *, tied: bool) -> DecoderSpec:
    config.expect("rms_norm", True)
    norm = NormSpec("rms", config.number("layer_norm_epsilon", 1e-5))
    return DecoderSpec(
        width=config.size("hidden_size"),
        vocab_size=config.size("vocab_size"),
        blocks=(BlockSpec(None, None, norm, recurrent=recurrent),) * config.size("num_hidden_layers"),
        final_norm=norm,
        tied_head=config.flag("tie_word_embeddings", tied),
        max_positions=config.size("max_position_embeddings", POSITIONS),
    )


def _mamba_spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    width = config.size("hidden_size")
    rank = config.get("time_step_rank", "auto")
    inner = int(config.number("expand", 2) * width)
    if config.get("intermediate_size", inner) != inner:
        raise ModelLoadError(f"config.json: intermediate_size={config.get('intermediate_size')} must be expand * hidden_size = {inner}")
    mamba = MambaSpec(
        inner=inner,
        state_size=config.size("state_size", 16),
        conv_width=config.size("conv_kernel", 4),
        rank=math.ceil(width / 16) if rank == "auto" else config.size("time_step_rank"),
        activation=config.choice("hidden_act", ACTIVATIONS, "silu"),
        bias=config.flag("use_bias", False),
        conv_bias=config.flag("use_conv_bias", True),
    )
    return _decoder(config, mamba, tied=True)


def _mamba2_spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    heads, head_dim, groups = config.size("num_heads", 128), config.size("head_dim", 64), config.size("n_groups", 8)
    inner = config.number("expand", 2) * config.size("hidden_size")
    if heads * head_dim != inner or heads % groups:
        raise ModelLoadError(
            f"config.json: num_heads={heads} times head_dim={head_dim} must be expand * hidden_size = {inner:g}, and a multiple of"
            f" n_groups={groups}"
        )
    config.expect("intermediate_size", int(inner))
    mamba = Mamba2Spec(
        num_heads=heads,
        head_dim=head_dim,
        num_groups=groups,
        state_size=config.size("state_size", 128),
        conv_width=config.size("conv_kernel", 4),
        activation=config.choice("hidden_act", ACTIVATIONS, "silu"),
        bias=config.flag("use_bias", False),
        conv_bias=config.flag("use_conv_bias", True),
        dt_limits=dt_limits(config),
        norm=NormSpec("rms", config.number("layer_norm_epsilon", 1e-5)),
        norm_each=groups > 1,
    )
    return _decoder(config, mamba, tied=False)


def mamba2_of_hybrid(config: HFConfig, inner: int, norm: NormSpec | None, **options: Any) -> Mamba2Spec:
    """The Mamba 2 layer of a hybrid, under the keys that most of them share; `inner` is the number of its values."""
    heads, groups = config.size("mamba_n_heads", 128), config.size("mamba_n_groups", 1)
    head_dim = inner // heads if config.get("mamba_d_head", "auto") == "auto" else config.size("mamba_d_head")
    if heads * head_dim != inner or heads % groups:
        raise ModelLoadError(
            f"config.json: mamba_n_heads={heads} times mamba_d_head={head_dim} must be {inner}, and a multiple of mamba_n_groups={groups}"
        )
    return Mamba2Spec(
        num_heads=heads,
        head_dim=head_dim,
        num_groups=groups,
        state_size=config.size("mamba_d_state", 256),
        conv_width=config.size("mamba_d_conv", 4),
        activation=config.choice("hidden_act", ACTIVATIONS, "silu"),
        bias=config.flag("mamba_proj_bias", False),
        conv_bias=config.flag("mamba_conv_bias", True),
        dt_limits=dt_limits(config),
        norm=norm,
        norm_each=norm is not None and groups > 1,
        **options,
    )


def dt_limits(config: HFConfig) -> tuple[float, float]:
    """`time_step_limit`, whose upper end may be infinite, which transformers spells {"__float__": "Infinity"}.

    Raises:
        ModelLoadError: not two numbers.
    """
    limits = config.get("time_step_limit", (0.0, math.inf))
    try:
        low, high = (float(limit["__float__"] if isinstance(limit, dict) else limit) for limit in limits)
    except (TypeError, ValueError, KeyError):
        raise ModelLoadError(f"config.json: time_step_limit must be two numbers, got {limits!r}") from None
    return low, high


_LAYER = "backbone.layers.{i}"
_OUTER = (
    rule("embed.weight", "backbone.embeddings.weight", transform=TOKEN_ROWS),
    rule("layers.{i}.attention_norm.weight", f"{_LAYER}.norm.weight"),
    rule("final_norm.weight", "backbone.norm_f.weight"),
    rule("head.weight", "lm_head.weight", transform=TOKEN_ROWS),
)
# Of the original implementation, beside transformers' spelling of the same.
_ORIGINAL_KEYS = ("d_inner", "d_model", "n_layer", "fused_add_norm", "ssm_cfg", "pad_vocab_size_multiple", "norm_before_gate")
_RENAMED = ((r"backbone\.embedding\.", "backbone.embeddings."),)


def _family(architecture: str, to_spec: Callable[[HFConfig, int | None], DecoderSpec], rules: tuple[Rule, ...]) -> Family:
    harmless = (*HARMLESS, *_ORIGINAL_KEYS)
    return Family(architecture, to_spec, (*_OUTER, *rules), prefix="backbone.", renamed=_RENAMED, harmless_keys=harmless)


MAMBA = _family("MambaForCausalLM", _mamba_spec, mamba_rules(f"{_LAYER}.mixer"))
MAMBA2 = _family("Mamba2ForCausalLM", _mamba2_spec, mamba2_rules(f"{_LAYER}.mixer"))
