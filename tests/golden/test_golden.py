"""The decoder against transformers, in float32, on tiny random checkpoints."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from jaxllm.models.build import define_model
from tests.golden.cases import CASES, FAMILY_CASES
from tests.golden.checking import check, load


@pytest.mark.parametrize("name", [name for name in CASES if name not in FAMILY_CASES])
def test_greedy_tokens_and_logprobs_equal_transformers(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    check(case, *load(case.write(tmp_path), case))


@pytest.mark.parametrize(("name", "spelling"), [(case.name, i) for case in CASES.values() for i in range(len(case.spellings))])
def test_every_spelling_of_a_rope_means_the_same(name: str, spelling: int) -> None:
    case = CASES[name]
    models = [define_model(config, dtype="float32", max_model_len=case.max_model_len) for config in (case.config, case.spellings[spelling])]
    assert models[0].spec == models[1].spec


@pytest.mark.parametrize("use_diff", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_config_as_transformers_writes_it_means_the_same(name: str, use_diff: bool) -> None:
    case = CASES[name]
    values = {key: value for key, value in case.config.items() if key != "model_type"}
    written = json.loads(CONFIG_MAPPING[case.config["model_type"]](**values).to_json_string(use_diff=use_diff))
    models = [
        define_model(config | {"architectures": case.config["architectures"]}, dtype="float32", max_model_len=case.max_model_len)
        for config in (case.config, written)
    ]
    assert models[0].spec == models[1].spec


@pytest.mark.parametrize("name", ["llama", "llama_biases", "qwen2_window_layers", "gemma3", "gpt2_untied"])
@pytest.mark.parametrize("shards", [2, 4])
def test_replicated_kv_heads_do_not_change_the_mathematics(name: str, shards: int, tmp_path: Path) -> None:
    case = CASES[name]
    model, params = load(case.write(tmp_path), case, tensor_parallel_size=shards)
    assert all(layer.num_kv_heads % shards == 0 for layer in model.cache_layers)
    check(case, model, params)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mistral_window", {"sliding_window": 15}),
        ("mistral_window", {"sliding_window": 17}),
        ("mistral_window", {"sliding_window": None}),
        ("qwen2_types_full", {"layer_types": ["full_attention", "sliding_attention"]}),
        ("gemma3", {"rope_local_base_freq": 12000.0}),
        ("gemma3", {"query_pre_attn_scalar": 17}),
        ("llama_rope_yarn_magnitude", {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}),
    ],
)
def test_golden_outputs_notice_a_small_change_of_the_mathematics(name: str, change: dict[str, Any], tmp_path: Path) -> None:
    case = CASES[name]
    changed = replace(case, config=case.config | change)
    with pytest.raises(AssertionError):
        check(case, *load(changed.write(tmp_path), changed))
