"""Architectures that transformers does not implement, or implements as another: their weights in their own layout, under their own
config, must become the decoder that is compared with transformers (`tests/runner/test_golden_engine.py`, `test_golden.py`).
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from jaxllm.models.build import ModelDef, define_model
from jaxllm.models.registry import FAMILIES
from jaxllm.weights.rules import load_params
from tests.checkpoints import MemoryCheckpoint
from tests.golden.cases import BY_ARCHITECTURE, CASES

Tensors = dict[str, np.ndarray]


def changed(name: str, architecture: str, **changes: Any) -> dict[str, Any]:
    """The config of a case as that of another architecture; None removes a key."""
    config = CASES[name].config | {"architectures": [architecture]} | changes
    return {key: value for key, value in config.items() if value is not None}


def renamed(tensors: Tensors, *pairs: tuple[str, str]) -> Tensors:
    for pattern, replacement in pairs:
        tensors = {re.sub(pattern, replacement, name): tensor for name, tensor in tensors.items()}
    return tensors


def internlm2() -> tuple[str, dict[str, Any], Tensors]:
    config = changed("llama", "InternLM2ForCausalLM", model_type="internlm2", bias=False, attn_implementation="eager", head_dim=None)
    tensors = CASES["llama"].tensors()
    for i in range(2):
        # 4 query heads of 8 share 2 KV heads.
        q, k, v = (tensors.pop(f"model.layers.{i}.self_attn.{x}_proj.weight").reshape(2, -1, 8, 32) for x in "qkv")
        tensors[f"model.layers.{i}.attention.wqkv.weight"] = np.concatenate([q, k, v], axis=1).reshape(-1, 32)
    names = (
        (r"embed_tokens", "tok_embeddings"), (r"self_attn\.o_proj", "attention.wo"), (r"mlp\.gate_proj", "feed_forward.w1"),
        (r"mlp\.up_proj", "feed_forward.w3"), (r"mlp\.down_proj", "feed_forward.w2"), (r"input_layernorm", "attention_norm"),
        (r"post_attention_layernorm", "ffn_norm"), (r"^lm_head", "output"),
    )  # fmt: skip
    return "llama", config, renamed(tensors, *names)


def internlm3() -> tuple[str, dict[str, Any], Tensors]:
    config = changed("llama_biases", "InternLM3ForCausalLM", attention_bias=None, mlp_bias=None, qkv_bias=True, bias=True)
    return "llama_biases", config, CASES["llama_biases"].tensors()


def minicpm() -> tuple[str, dict[str, Any], Tensors]:
    config = changed(
        "granite_tied", "MiniCPMForCausalLM", embedding_multiplier=None, residual_multiplier=None, attention_multiplier=None,
        logits_scaling=None, scale_emb=4, scale_depth=0.7 * 2**0.5, dim_model_base=16,
    )  # fmt: skip
    return "granite_tied", config, CASES["granite_tied"].tensors()


def text_half(name: str, architecture: str, *names: tuple[str, str], **outer: Any) -> tuple[str, dict[str, Any], Tensors]:
    text = {key: value for key, value in CASES[name].config.items() if key != "architectures"}
    config = {"architectures": [architecture], "text_config": text, "vision_config": {"hidden_size": 8}, **outer}
    vision = {"model.vision_tower.x.weight": np.zeros(3, np.float32), "multi_modal_projector.y.weight": np.zeros(3, np.float32)}
    return name, config, renamed(CASES[name].tensors(), *names) | vision


RELATIVES = {
    "InternLM2ForCausalLM": internlm2,
    "InternLM3ForCausalLM": internlm3,
    "MiniCPMForCausalLM": minicpm,
    "Gemma3ForConditionalGeneration": lambda: text_half(
        "gemma3", "Gemma3ForConditionalGeneration", (r"^model\.", "language_model.model."), mm_tokens_per_image=256
    ),
    "Gemma4ForConditionalGeneration": lambda: text_half(
        "gemma4", "Gemma4ForConditionalGeneration", (r"^model\.", "model.language_model."), image_token_id=120, tie_word_embeddings=True
    ),
    "Llama4ForConditionalGeneration": lambda: text_half(
        "llama4",
        "Llama4ForConditionalGeneration",
        (r"^", "language_model."),
        image_token_index=120,
        boi_token_index=121,
        eoi_token_index=122,
    ),
    "Mistral3ForConditionalGeneration": lambda: text_half(
        "ministral3", "Mistral3ForConditionalGeneration", (r"^", "language_model."), spatial_merge_size=2
    ),
    "Qwen3_5ForConditionalGeneration": lambda: text_half(
        "qwen3_5", "Qwen3_5ForConditionalGeneration", (r"^model\.", "model.language_model."), image_token_id=120
    ),
    "Qwen3_5MoeForConditionalGeneration": lambda: text_half(
        "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", (r"^model\.", "model.language_model."), image_token_id=120
    ),
}


def check_same(name: str, config: dict[str, Any], tensors: Tensors) -> None:
    """Check that these tensors under this config are the decoder of the case."""
    (model, params), (relative, expected) = (load(config, tensors), load(CASES[name].config, CASES[name].tensors()))
    assert model.spec == relative.spec
    for name, array, want in zip(model.names, params, expected, strict=True):
        np.testing.assert_array_equal(array, want, err_msg=name)


def load(config: dict[str, Any], tensors: Tensors) -> tuple[ModelDef, list[np.ndarray]]:
    model = define_model(config, dtype="float32")
    return model, load_params(model, MemoryCheckpoint(tensors), lambda name, array: np.asarray(array))


@pytest.mark.parametrize("architecture", RELATIVES)
def test_spec_and_weights_are_those_of_the_relative(architecture: str) -> None:
    check_same(*RELATIVES[architecture]())


def test_names_of_older_checkpoints_are_read() -> None:
    case = CASES["gpt_neox"]
    check_same(case.name, case.config, renamed(case.tensors(), (r"^lm_head", "embed_out")))


def test_projections_that_a_layer_shares_with_another_are_not_needed() -> None:
    case = CASES["gemma4"]
    unused = {"model.layers.5.self_attn.k_proj.weight": np.zeros((32, 32), np.float32)}
    check_same(case.name, case.config, case.tensors() | unused)


def test_every_architecture_is_compared_with_a_reference() -> None:
    assert set(FAMILIES) <= set(BY_ARCHITECTURE) | set(RELATIVES)
