"""Mistral: Llama with a sliding window over all layers."""

from __future__ import annotations

from jaxllm.models.family import Family, layer_windows
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.llama import IGNORED, RULES, llama_like
from jaxllm.specs import DecoderSpec


def _spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    # Null means full attention, absent means the window of the first release.
    window = config.size("sliding_window", 4096) if config.get("sliding_window") or not config.given("sliding_window") else None
    windows = layer_windows(config, window, default=lambda layer: True)
    return llama_like(config, max_model_len, default_positions=131072, windows=windows)


MISTRAL = Family("MistralForCausalLM", _spec, RULES, prefix="model.", ignored=IGNORED)
