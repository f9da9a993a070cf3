"""Families that are Llama with one or two differences: multipliers, defaults, biases, layers without rotation, where norms stand."""

from __future__ import annotations

from dataclasses import replace

from jaxllm.errors import ModelLoadError
from jaxllm.models.family import Family, change_attend, change_blocks, layer_windows, only_rotated
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.llama import IGNORED, RULES, llama_like
from jaxllm.models.names import decoder_rules
from jaxllm.specs import DecoderSpec


def granite_like(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    """Llama with Granite's multipliers."""
    bias = config.flag("attention_bias", False)
    mlp_bias = config.flag("mlp_bias", False)
    spec = llama_like(config, max_model_len, default_positions=2048, qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias)
    spec = change_attend(spec, scale=config.number("attention_multiplier", 1.0))
    scale = config.number("residual_multiplier", 1.0)
    return replace(
        change_blocks(spec, lambda i, block: replace(block, residual_scale=scale)),
        embedding_scale=config.number("embedding_multiplier", 1.0),
        logit_scale=1.0 / config.number("logits_scaling", 1.0),
    )


def _seed_oss_spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    config.size("head_dim")
    return llama_like(
        config,
        max_model_len,
        default_positions=524288,
        qkv_bias=config.flag("attention_bias", True),
        out_bias=config.flag("attention_out_bias", False),
        mlp_bias=config.flag("mlp_bias", False),
    )


def ernie_like(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    bias = config.flag("use_bias", False)
    return llama_like(
        config,
        max_model_len,
        default_positions=131072,
        default_theta=500_000.0,
        interleaved=True,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        tied=True,
    )


def _ernie_spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    # Without it the reference takes 128, whatever the width: better said than guessed.
    config.size("head_dim")
    return ernie_like(config, max_model_len)


def _smollm3_spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    num_layers, interval = config.size("num_hidden_layers"), config.size("no_rope_layer_interval", 4)
    rotated = config.get("no_rope_layers") or [(i + 1) % interval != 0 for i in range(num_layers)]
    if len(rotated) < num_layers:
        raise ModelLoadError(f"config.json: no_rope_layers has {len(rotated)} entries for num_hidden_layers={num_layers}")
    in_force = config.flag("use_sliding_window", False) and config.get("sliding_window") is not None
    window = config.size("sliding_window") if in_force else None
    windows = layer_windows(config, window, default=lambda layer: not rotated[layer])
    bias = config.flag("attention_bias", False)
    spec = llama_like(
        config,
        max_model_len,
        default_positions=32768,
        default_theta=2_000_000.0,
        windows=windows,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
        tied=True,
    )
    return only_rotated(spec, rotated)


def _exaone4_spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    """Norms on the outputs; models with windowed layers rotate in those only."""
    window = config.size("sliding_window", 4096) if config.get("sliding_window") or not config.given("sliding_window") else None
    pattern = config.get("sliding_window_pattern", 4)
    windowed = [kind == "L" for kind in pattern] if isinstance(pattern, str) else [True] * (int(pattern) - 1) + [False]
    windows = layer_windows(config, window, default=lambda layer: windowed[layer % len(windowed)])
    spec = llama_like(config, max_model_len, default_positions=2048, windows=windows, placement="output", qk_norm=True)
    return spec if window is None else only_rotated(spec, windows)


def _internlm3_spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    bias = config.flag("bias", config.flag("mlp_bias", False))
    qkv_bias = config.flag("qkv_bias", config.flag("attention_bias", False))
    return llama_like(config, max_model_len, default_positions=32768, qkv_bias=qkv_bias, out_bias=bias, mlp_bias=bias)


def _helium_spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    bias, mlp_bias = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    return llama_like(
        config, max_model_len, default_positions=4096, default_theta=100_000.0, interleaved=True, qkv_bias=bias, mlp_bias=mlp_bias
    )


_OUTPUT_NORM_RULES = decoder_rules(attention_post_norm="post_attention_layernorm", mlp_post_norm="post_feedforward_layernorm")

GRANITE = Family("GraniteForCausalLM", granite_like, RULES, prefix="model.", ignored=IGNORED)
SEED_OSS = replace(GRANITE, architecture="SeedOssForCausalLM", to_spec=_seed_oss_spec, harmless_keys=("residual_dropout",))
ERNIE = replace(GRANITE, architecture="Ernie4_5ForCausalLM", to_spec=_ernie_spec)
SMOLLM3 = replace(GRANITE, architecture="SmolLM3ForCausalLM", to_spec=_smollm3_spec, harmless_keys=("max_window_layers",))
EXAONE4 = replace(GRANITE, architecture="Exaone4ForCausalLM", to_spec=_exaone4_spec, rules=_OUTPUT_NORM_RULES)
HELIUM = replace(GRANITE, architecture="HeliumForCausalLM", to_spec=_helium_spec)
INTERNLM3 = replace(GRANITE, architecture="InternLM3ForCausalLM", to_spec=_internlm3_spec)
