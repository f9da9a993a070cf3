"""The decoder over several shards: the logical axes let XLA move activations and never weights, and the numbers stay."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from jaxllm.models.build import ModelDef, define_model
from jaxllm.ops.moe import sharded_experts
from jaxllm.runner.mesh import Placement, make_mesh
from jaxllm.specs import AttendSpec
from jaxllm.weights.rules import load_params
from tests.checkpoints import MemoryCheckpoint
from tests.dense import all_logits, dense_attend
from tests.golden.case import load_golden
from tests.golden.cases import CASES
from tests.golden.checking import check_logits


def run_sharded(name: str, shards: int) -> tuple[ModelDef, str]:
    """Run a golden case over `shards` devices, compare it with transformers; returns the model and the compiled program."""
    case, golden = CASES[name], load_golden(name)
    placement = Placement(make_mesh(shards))
    model = define_model(case.config, dtype="float32", tensor_parallel_size=shards, max_model_len=case.max_model_len)
    params = load_params(model, MemoryCheckpoint(case.tensors()), lambda name, array: placement.put(array, model.axes[name]))
    heads = PartitionSpec(None, "model")
    experts = sharded_experts(placement.mesh, experts_axis="expert", width_axis="model")

    def attend(
        q: jax.Array,
        k: jax.Array | None,
        v: jax.Array | None,
        cache: Any,
        spec: AttendSpec,
        sinks: jax.Array | None = None,
        bias: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        kept = heads if spec.latent is None else PartitionSpec()
        local = jax.shard_map(
            lambda q, k, v, cache, sinks, bias: dense_attend(q, k, v, cache, spec, sinks, bias),
            mesh=placement.mesh,
            in_specs=(heads, kept, kept, kept, PartitionSpec("model"), PartitionSpec("model")),
            out_specs=(heads, kept),
        )
        return local(q, k, v, cache, sinks, bias if spec.alibi is None else jnp.asarray(spec.alibi))

    def forward(params: Sequence[jax.Array], ids: jax.Array, encoder_ids: jax.Array | None) -> jax.Array:
        return all_logits(model, params, ids, encoder_ids, attend, experts=experts)

    ids = jnp.asarray(golden.sequence, jnp.int32)
    encoder_ids = None if golden.encoder is None else jnp.asarray(golden.encoder, jnp.int32)
    program = jax.jit(forward, out_shardings=placement.sharding()).lower(params, ids, encoder_ids).compile()
    check_logits(golden, program(params, ids, encoder_ids))
    return model, program.as_text()


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "qwen3_next", "t5", "bart"])
def test_two_shards_only_sum_until_they_gather_the_logits(name: str) -> None:
    model, program = run_sharded(name, 2)
    exchanges = re.findall(r"= f32\[([\d,]*)\]\S* (all-reduce|all-gather|all-to-all|collective-permute)\(", program)
    # The logits are gathered once; everything else is a sum of partial results.
    tokens = len(load_golden(name).sequence)
    assert [shape for shape, kind in exchanges if kind != "all-reduce"] == [f"{tokens},{model.vocab_size}"]


@pytest.mark.parametrize("name", ["llama", "mistral_window", "qwen2", "qwen3", "gemma3", "gpt2"])
def test_four_shards_sum_once_after_the_embedding_and_twice_a_layer(name: str) -> None:
    model, program = run_sharded(name, 4)
    assert len(re.findall(r"= f32\[[\d,]*\]\S* all-reduce\(", program)) == 1 + 2 * len(model.spec.blocks)
