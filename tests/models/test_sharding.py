"""The decoder over four shards: the logical axes let XLA move activations and never weights, and the numbers stay."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxllm.models.build import define_model
from jaxllm.models.registry import FAMILIES
from jaxllm.runner.mesh import Placement, make_mesh
from jaxllm.specs import AttendSpec
from jaxllm.weights.rules import load_params
from tests.checkpoints import MemoryCheckpoint, random_tensors, tiny_config
from tests.dense import dense_attend, run_dense

SHARDS = 4


@pytest.mark.parametrize("tokens", [8, 80])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_only_activations_are_exchanged(architecture: str, tokens: int) -> None:
    config = tiny_config(architecture)
    checkpoint = MemoryCheckpoint(random_tensors(config))
    placement = Placement(make_mesh(SHARDS))
    model = define_model(config, dtype="float32", tensor_parallel_size=SHARDS)
    params = load_params(model, checkpoint, lambda name, array: placement.put(array, model.axes[name]))
    heads = PartitionSpec(None, "model")

    def attend(
        q: jax.Array, k: jax.Array, v: jax.Array | None, cache: Any, spec: AttendSpec, sinks: jax.Array | None = None
    ) -> tuple[jax.Array, Any]:
        local = jax.shard_map(
            lambda q, k, v, sinks: dense_attend(q, k, v, None, spec, sinks)[0],
            mesh=placement.mesh,
            in_specs=(heads, *(heads if spec.latent is None else PartitionSpec(),) * 2, PartitionSpec("model")),
            out_specs=heads,
        )
        return local(q, k, v, sinks), cache

    def forward(params: Sequence[jax.Array], ids: jax.Array) -> jax.Array:
        decoder = model.bind(params)
        hidden, _ = decoder(ids, jnp.arange(tokens), [None] * len(model.cache_layers), attend)
        return decoder.logits(hidden)

    ids = jnp.asarray(np.random.default_rng(0).integers(0, 128, tokens), jnp.int32)
    program = jax.jit(forward, out_shardings=placement.sharding()).lower(params, ids).compile()

    exchanges = re.findall(r"= f32\[([\d,]*)\]\S* (all-reduce|all-gather|all-to-all|collective-permute)\(", program.as_text())
    # One sum after the embedding and two a layer; the logits are gathered once.
    assert [kind for _, kind in exchanges].count("all-reduce") == 1 + 2 * len(model.spec.blocks)
    assert [shape for shape, kind in exchanges if kind != "all-reduce"] == [f"{tokens},128"]
    whole = define_model(config, dtype="float32")
    expected = run_dense(whole, load_params(whole, checkpoint, lambda name, array: jnp.asarray(array)), np.asarray(ids))
    np.testing.assert_allclose(program(params, ids), expected, rtol=1e-4, atol=1e-4)
