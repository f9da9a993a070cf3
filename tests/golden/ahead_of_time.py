"""Steps of the golden cases for accelerators that are not there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxllm.models.build import define_model
from pallas_kernels.devices import parse_target
from tests.golden.case import Case
from tests.golden.pooling_cases import PoolingCase

# Keys of configs that count elements of vectors; what is made of them grows with them.
_WIDTHS = frozenset(
    """
    hidden_size intermediate_size intermediate_size_mlp head_dim global_head_dim n_embd d_model ffn_dim word_embed_proj_dim rotary_dim
    dim hidden_dim
    hidden_size_per_layer_input kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim moe_intermediate_size
    shared_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size mamba_d_ssm mamba_d_head mamba_head_dim
    linear_key_head_dim linear_value_head_dim
    """.split()  # noqa: SIM905
)
_FACTOR = 8


def widened(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with vectors 8 times as wide: accelerators have kernels for real heads, not for those of tiny models."""
    wide = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            value = widened(value)
        elif key in _WIDTHS and isinstance(value, int):
            value = _FACTOR * value
        elif key in ("short_factor", "long_factor"):
            value = [factor for factor in value for _ in range(_FACTOR)]
        elif key == "mrope_section":
            value = [_FACTOR * size for size in value]
        wide[key] = value
    return wide


def step_request(case: Case, target: str, num_tokens: int = 16) -> dict[str, Any]:
    """What `runner.aot` compiles: a step of 16 rows in bfloat16 on one device; a step of decodes where there are no more tokens."""
    page_size = 128 if parse_target(target).device.platform == "tpu" else 64
    sizes = {"num_tokens": num_tokens, "num_rows": 16, "page_size": page_size, "max_model_len": 256, "num_pages": 65}
    return {"target": target, "hf_config": widened(case.config), "dtype": "bfloat16", **sizes}


def encoder_request(case: Case, target: str) -> dict[str, Any]:
    """A step of the encoder of a model that has one: 16 inputs of 256 tokens together."""
    return step_request(case, target, num_tokens=256) | {"program": "encoder"}


def pooling_request(case: PoolingCase, target: str) -> dict[str, Any]:
    """A step of a model that is pooled, likewise."""
    config = {key: value for key, value in case.config.items() if key not in ("classifier_from_token", "is_original_qwen3_reranker")}
    sizes = {"num_tokens": 256, "num_rows": 16}
    about = {"target": target, "hf_config": widened(config), "dtype": "bfloat16", **sizes}
    return about | {"program": "pooling", "token_ids": case.token_ids}


def attention_backend(case: Case, num_kernels: int) -> str:
    """What runs the attention of a step of decodes that was compiled with so many kernels, one a layer."""
    layers = sum((block.mixer is not None) + (block.cross is not None) for block in define_model(case.config, dtype="bfloat16").spec.blocks)
    if layers == 0:
        return "no attention"
    return "XLA" if num_kernels == 0 else "kernel" if num_kernels == layers else "kernel and XLA"
