"""Mistral: Llama with a sliding window over all layers; Ministral with one over some; Ministral 3 with queries that grow with their
position.
"""

from __future__ import annotations

from dataclasses import replace

from jaxllm.models.family import Family, change_attention, layer_windows, text_half
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.llama import IGNORED, RULES, llama_like
from jaxllm.models.rope import LayerRopes, read_rope
from jaxllm.specs import DecoderSpec, TemperatureSpec


def _windows(config: HFConfig, default: int | None) -> list[int | None]:
    # Null means full attention, absent means the default.
    window = config.size("sliding_window", default) if config.get("sliding_window") or not config.given("sliding_window") else None
    return layer_windows(config, window, default=lambda layer: True)


def _spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    return llama_like(config, max_model_len, default_positions=131072, windows=_windows(config, 4096))


def _ministral3_spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    positions = config.size("max_position_embeddings", 262144)
    # Without one the reference takes a YaRN of its own: better said than guessed.
    values = dict(config.get("rope_scaling") or config.need("rope_parameters"))
    beta = values.pop("llama_4_scaling_beta", None)
    values.pop("max_position_embeddings", None)
    rope = read_rope(config, max_positions=positions, default_theta=config.number("rope_theta", 1e6), values=values)
    windows = _windows(config, None) if config.get("sliding_window") else None
    spec = llama_like(config, max_model_len, default_positions=positions, ropes=LayerRopes(rope, rope), windows=windows)
    spec = replace(spec, max_positions=positions)
    if beta is None:
        return spec
    growth = TemperatureSpec(float(beta), rope.number("original_max_position_embeddings"))
    return change_attention(spec, lambda i, mixer: replace(mixer, temperature=growth))


MISTRAL = Family("MistralForCausalLM", _spec, RULES, prefix="model.", ignored=IGNORED)
MINISTRAL = replace(MISTRAL, architecture="MinistralForCausalLM")
MINISTRAL3 = replace(MISTRAL, architecture="Ministral3ForCausalLM", to_spec=_ministral3_spec)


def _text_spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
    kind = config.get("model_type", "mistral")
    config.expect("model_type", "mistral", "ministral3")
    return (_ministral3_spec if kind == "ministral3" else _spec)(config, max_model_len)


MISTRAL3_TEXT_HALF = text_half(
    replace(MISTRAL, to_spec=_text_spec),
    "Mistral3ForConditionalGeneration",
    defaults={"head_dim": 128},
    harmless=(
        "image_token_index", "image_token_id", "projector_hidden_act", "multimodal_projector_bias", "spatial_merge_size",
        "vision_feature_layer",
    ),
)  # fmt: skip
