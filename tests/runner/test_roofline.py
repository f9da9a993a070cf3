"""What a model's work costs, against sums that can be checked by hand."""

from __future__ import annotations

from typing import Any

from jaxllm.models.build import define_model
from jaxllm.ops.attention import choose_backend
from jaxllm.runner.mesh import Placement, make_mesh
from jaxllm.runner.roofline import Roofline
from tests.checkpoints import tiny_config


def roofline(**changes: Any) -> Roofline:
    model_def = define_model(tiny_config(**changes), dtype="float32")
    return Roofline.of(model_def, choose_backend("cpu"), Placement(make_mesh(1)), 8)


def test_every_computed_token_uses_the_layers_and_every_new_one_the_head():
    cost = roofline()
    # Three prompt tokens and the first of two new ones are computed, which see 1 + 2 + 3 + 4 positions; two tokens are predicted.
    attention = 2 * 2 * cost.model_def.spec.blocks[0].mixer.num_heads * (8 + 8) * (1 + 2 + 3 + 4)

    assert cost.generation([(3, 2)], 2, 0).flops == 2 * cost.layer_weights * 4 + 2 * cost.head * 2 + attention


def test_cached_prompt_tokens_are_not_computed():
    cost = roofline()

    saved = cost.generation([(3, 2)], 2, 0).flops - cost.generation([(3, 2)], 2, 2).flops

    assert saved == 2 * cost.layer_weights * 2


def test_each_step_reads_all_weights_once_and_each_new_token_the_positions_before_it():
    cost = roofline()

    assert cost.generation([(1, 1)], 3, 0).bytes == 3 * cost.weight_bytes
    # The second of two new tokens reads four positions and writes one of them.
    assert cost.generation([(3, 2)], 1, 0).bytes == cost.weight_bytes + sum(cost.kv_bytes) * (4 + 1)


def test_a_window_bounds_what_a_query_sees():
    wide, narrow = roofline(), roofline(architecture="MistralForCausalLM", sliding_window=2)

    per_position = (wide.generation([(2, 1)], 1, 0).flops - wide.generation([(1, 1)], 1, 0).flops - 2 * wide.layer_weights) / 2
    assert narrow.generation([(3, 2)], 1, 0).flops == wide.generation([(3, 2)], 1, 0).flops - 3 * per_position
