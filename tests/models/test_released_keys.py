"""Configs as they were released, with keys that nothing reads: what changes no answer is accepted, what would is refused."""

from __future__ import annotations

from typing import Any

import pytest

from jaxllm.models.pooling import define_pooling
from jaxllm.models.registry import FAMILIES, SPELLINGS, find_family
from tests.golden.cases import CASES
from tests.golden.pooling_cases import CASES as POOLING_CASES
from tests.models.test_absent_keys import spec_of

# By the case that has the other keys.
RELEASED: dict[str, dict[str, Any]] = {
    "gpt2": {"n_special": 0, "predict_special_tokens": True},
    "phi": {"rotary_dim": 4},
    "gpt_neox": {"custom_pipelines": {"text-generation": {"impl": "pipeline.Pipeline"}}},
    "hunyuan_moe": {"norm_topk_prob": True, "use_mixed_mlp_moe": True, "routed_scaling_factor": False, "num_shared_expert": [1, 1]},
    "ernie_moe": {"moe_capacity": [64, 64, 64], "moe_use_aux_free": True, "moe_gate": "topk", "num_nextn_predict_layers": 1},
    "mamba2": {"intermediate_size": 64, "time_step_rank": 256, "norm_before_gate": True},
    "jamba": {"n_ctx": 262144},
    "falcon_new": {"ff_factor": 4},
    "falcon_h1": {"time_step_rank": "auto"},
    "bart": {"save_step": 44, "replacing_rate": 0, "extra_pos_embeddings": 2, "static_position_embeddings": False},
}
POOLED: dict[str, dict[str, Any]] = {
    "bert": {
        "directionality": "bidi", "pooler_fc_size": 768, "pooler_num_attention_heads": 12, "pooler_num_fc_layers": 3,
        "pooler_size_per_head": 128, "pooler_type": "first_token_transform",
    },
    "distilbert_classify": {"tie_weights_": True, "sinusoidal_pos_embds": False},
    "modernbert": {"layer_norm_eps": 1e-5, "position_embedding_type": "absolute"},
}  # fmt: skip
OTHERWISE: dict[str, dict[str, Any]] = {
    "phi": {"rotary_dim": 8},
    "hunyuan": {"use_cla": True},
    "hunyuan_moe": {"norm_topk_prob": False},
    "ernie_moe": {"moe_use_aux_free": False},
    "mamba2": {"intermediate_size": 96},
}


@pytest.mark.parametrize("name", RELEASED)
def test_keys_of_releases_that_change_nothing_are_accepted(name: str) -> None:
    config = CASES[name].config
    expected = spec_of(config)
    assert expected is not None
    assert spec_of(config | RELEASED[name]) == expected


@pytest.mark.parametrize("name", POOLED)
def test_so_are_those_of_encoders(name: str) -> None:
    config = POOLING_CASES[name].config
    plain, released = (define_pooling(values, dtype="float32").pooling for values in (config, config | POOLED[name]))
    assert plain == released


@pytest.mark.parametrize("name", OTHERWISE)
def test_the_same_keys_with_values_that_are_not_implemented_are_refused(name: str) -> None:
    assert spec_of(CASES[name].config | OTHERWISE[name]) is None


def test_other_names_of_an_architecture_are_the_same_family() -> None:
    for spelling, architecture in SPELLINGS.items():
        assert find_family({"architectures": [spelling], "rms_norm_eps": 1e-5}) is FAMILIES[architecture]
