"""What a model's work costs, against sums that can be checked by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxllm.cli.bench.roofline import Attention, ModelCost, model_cost, ratios
from jaxllm.cli.bench.workload import BenchRequest
from jaxllm.config import EngineConfig

PLAIN = ModelCost(body_params=100, head_params=10, bytes_per_param=4, attention=())


def test_every_computed_token_uses_the_body_and_every_new_one_the_head():
    # Three prompt tokens and the first of two new ones are computed; two are predicted.
    assert PLAIN.flops([BenchRequest([1, 2, 3], 2)]) == 2 * 100 * 4 + 2 * 10 * 2


def test_cached_prompt_tokens_are_not_computed():
    assert PLAIN.flops([BenchRequest([1, 2, 3], 2)], num_cached_tokens=2) == 2 * 100 * 2 + 2 * 10 * 2


def test_each_step_reads_all_weights_once():
    assert PLAIN.bytes_read([BenchRequest([1], 1)], num_steps=3) == 3 * 110 * 4


def test_attention_counts_what_each_query_sees():
    cost = ModelCost(0, 0, 2, (Attention(query_size=8, kv_size=6, window=None),))

    # Computed: positions 0..3, which see 1, 2, 3 and 4 positions; decoded among them: position 3.
    assert cost.flops([BenchRequest([1, 2, 3], 2)]) == 4 * 8 * (1 + 2 + 3 + 4)
    assert cost.bytes_read([BenchRequest([1, 2, 3], 2)], num_steps=0) == 2 * 6 * 4


def test_a_window_bounds_what_a_query_sees():
    cost = ModelCost(0, 0, 2, (Attention(query_size=8, kv_size=6, window=2),))

    assert cost.flops([BenchRequest([1, 2, 3], 2)]) == 4 * 8 * (1 + 2 + 2 + 2)


def test_ratios_are_of_all_devices_together():
    limits = {"bytes_per_second": 440.0, "flops_per_second": {"float32": 220.0}}

    found = ratios(PLAIN, limits, [BenchRequest([1], 1)], seconds=2.0, num_steps=1, num_cached_tokens=0, devices=2, dtype="float32")

    assert found["mbu"] == pytest.approx(110 * 4 / 2 / 880)
    assert found["mfu"] == pytest.approx(220 / 2 / 440)


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_counted_from_the_config_alone(tmp_path: Path, tied: bool):
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32, "max_position_embeddings": 64, **sizes}
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": tied, "rms_norm_eps": 1e-6}))

    cost = model_cost(EngineConfig.from_options(model=str(tmp_path), load_format="dummy"), "bfloat16")

    attention, mlp, norms = 8 * 8 + 2 * 8 * 4 + 8 * 8, 3 * 8 * 16, 2 * 8
    assert cost.body_params == 2 * (attention + mlp + norms) + 8
    assert cost.head_params == 32 * 8
    assert cost.bytes_per_param == 2
    assert cost.attention == (Attention(query_size=8, kv_size=8, window=None),) * 2
