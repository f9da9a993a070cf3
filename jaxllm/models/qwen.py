"""Qwen2 (biases on queries, keys and values) and Qwen3 (normalised query and key heads)."""

from __future__ import annotations

from jaxllm.models.family import Family, layer_windows
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.llama import IGNORED, RULES, llama_like
from jaxllm.specs import DecoderSpec


def _windows(config: HFConfig) -> list[int | None]:
    """`sliding_window` counts only where `use_sliding_window` is set, for layers from `max_window_layers` on or as `layer_types` says."""
    window, first = config.size("sliding_window", 4096), config.get("max_window_layers", 28)
    in_force = config.flag("use_sliding_window", False)
    return layer_windows(config, window if in_force else None, default=lambda layer: in_force and layer >= first)


def _qwen2_spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    return llama_like(config, max_model_len, default_positions=32768, windows=_windows(config), qkv_bias=True)


def _qwen3_spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    # Without it the reference takes 128, whatever the width: better said than guessed.
    config.size("head_dim")
    bias = config.flag("attention_bias", False)
    windows = _windows(config)
    return llama_like(config, max_model_len, default_positions=32768, windows=windows, qkv_bias=bias, out_bias=bias, qk_norm=True)


QWEN2 = Family("Qwen2ForCausalLM", _qwen2_spec, RULES, prefix="model.", ignored=IGNORED)
QWEN3 = Family("Qwen3ForCausalLM", _qwen3_spec, RULES, prefix="model.", ignored=IGNORED)
