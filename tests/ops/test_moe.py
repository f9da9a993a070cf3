"""Routing rules against numpy, and the experts' work against a plain loop over tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jaxllm.ops import moe
from jaxllm.ops.moe import ExpertWeights, Routing, route, run_experts, sharded_experts
from jaxllm.specs import RouterSpec
from pallas_kernels.grouped_matmul.triton import ragged_dot

EXPERTS, GROUPS, WIDTH, HIDDEN = 6, 2, 8, 12


def gate(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def weights(rng: np.random.Generator, *, bias: bool = False) -> ExpertWeights:
    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    part = HIDDEN // GROUPS
    return ExpertWeights(
        normal(EXPERTS, GROUPS, WIDTH, 2 * part), normal(EXPERTS, GROUPS, 2, part) if bias else None, normal(EXPERTS, HIDDEN, WIDTH)
    )


def plain(x: jax.Array, routing: Routing, w: ExpertWeights, weigh_inputs: bool) -> np.ndarray:
    out = np.zeros(x.shape)
    for t, (experts, shares) in enumerate(zip(np.asarray(routing.experts), np.asarray(routing.weights), strict=True)):
        for e, share in zip(experts, shares, strict=True):
            both = np.einsum("nmcp,m->ncp", w.gate_up[e].reshape(GROUPS, WIDTH, 2, -1), x[t]) * (share if weigh_inputs else 1)
            both = both if w.gate_up_bias is None else both + np.asarray(w.gate_up_bias[e])
            y = np.asarray(gate(both[:, 0], both[:, 1])).reshape(-1) @ np.asarray(w.down[e])
            out[t] += y if weigh_inputs else y * share
    return out


# How tokens choose: evenly, all the same experts, one expert far more often than others.
CHOICES = {
    "one token": lambda rng: rng.permuted(np.tile(np.arange(EXPERTS), (1, 1)), axis=1)[:, :2],
    "even": lambda rng: rng.permuted(np.tile(np.arange(EXPERTS), (40, 1)), axis=1)[:, :2],
    "all to two": lambda rng: np.tile([4, 1], (37, 1)),
    "one crowded": lambda rng: np.stack([np.full(21, 5), rng.integers(0, 5, 21)], axis=1),
}


@pytest.mark.parametrize("weigh_inputs", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", CHOICES)
def test_every_token_gets_the_weighted_sum_of_its_experts(name: str, bias: bool, weigh_inputs: bool) -> None:
    rng = np.random.default_rng(1)
    experts = jnp.asarray(CHOICES[name](rng), jnp.int32)
    x = jnp.asarray(rng.normal(size=(len(experts), WIDTH)), jnp.float32)
    routing = Routing(experts, jnp.asarray(rng.uniform(0.2, 1.0, experts.shape), jnp.float32))
    w = weights(rng, bias=bias)
    want = plain(x, routing, w, weigh_inputs)
    got = jax.jit(run_experts, static_argnames=("gate", "weigh_inputs"))(x, routing, w, gate=gate, weigh_inputs=weigh_inputs)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dot", [jax.lax.ragged_dot, partial(ragged_dot, interpret=True)], ids=["xla", "gpu kernel"])
def test_grouped_products_give_what_the_blocks_give(dot: Callable[..., jax.Array]) -> None:
    rng = np.random.default_rng(2)
    rows, counts = jnp.asarray(rng.normal(size=(23, WIDTH)), jnp.float32), jnp.asarray([3, 0, 11, 1, 0, 8])
    w = weights(rng, bias=True)
    got, want = moe._by_ragged_dot(rows, counts, w, gate, dot), moe._by_blocks(rows, counts, w, gate)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("platform", "kind", "module"),
    [
        ("tpu", "TPU v6 lite", "jax._src.lax.lax"),
        ("gpu", "NVIDIA H100 80GB HBM3", "pallas_kernels.grouped_matmul.gpu"),
        ("gpu", "NVIDIA B200", "pallas_kernels.grouped_matmul.gpu"),
        ("gpu", "NVIDIA A100-SXM4-80GB", "pallas_kernels.grouped_matmul.triton"),
        ("gpu", "NVIDIA RTX PRO 6000 Blackwell", "pallas_kernels.grouped_matmul.triton"),
    ],
)
def test_the_device_chooses_the_product(platform: str, kind: str, module: str) -> None:
    product = moe.choose_product(platform, kind)
    function = product.func if isinstance(product, partial) else product
    if module.endswith("gpu") and jax.__version_info__ < (0, 11):
        module = "pallas_kernels.grouped_matmul.triton"
    assert function.__module__ == module
    assert not isinstance(product, partial) or product.keywords == {"blackwell": kind == "NVIDIA B200"}
    assert moe.choose_product("cpu") is None


def test_an_overflow_stays_with_its_token() -> None:
    rng = np.random.default_rng(3)
    experts = jnp.asarray(CHOICES["even"](rng), jnp.int32)
    x = jnp.asarray(rng.normal(size=(len(experts), WIDTH)), jnp.float32)
    routing, w = Routing(experts, jnp.full(experts.shape, 0.5)), weights(rng)
    clean, dirty = (run_experts(given, routing, w, gate) for given in (x, x.at[3].set(jnp.nan)))
    np.testing.assert_allclose(np.delete(dirty, 3, 0), np.delete(clean, 3, 0), atol=1e-6)
    assert np.isnan(dirty[3]).all()


def test_devices_share_experts_and_their_widths() -> None:
    devices = np.array(jax.devices()[:4]).reshape(1, 2, 2)
    mesh = Mesh(devices, ("data", "expert", "model"), axis_types=(AxisType.Auto,) * 3)
    rng = np.random.default_rng(4)
    experts = jnp.asarray(CHOICES["one crowded"](rng), jnp.int32)
    x = jnp.asarray(rng.normal(size=(len(experts), WIDTH)), jnp.float32)
    routing, w = Routing(experts, jnp.full(experts.shape, 0.5)), weights(rng, bias=True)
    run = sharded_experts(mesh, experts_axis="expert", width_axis="model")
    got = jax.jit(lambda x, routing, w: run(x, routing, w, gate))(x, routing, w)
    np.testing.assert_allclose(got, run_experts(x, routing, w, gate), rtol=2e-5, atol=2e-5)


# --------------------------------------------------------------------------- routing


def softmax(x: np.ndarray) -> np.ndarray:
    return np.exp(x - x.max(-1, keepdims=True)) / np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)


def test_the_correction_changes_the_choice_and_not_the_weights() -> None:
    logits = np.array([[2.0, 1.0, 0.0, -1.0]], np.float32)
    spec = RouterSpec(4, 2, "sigmoid", correction=True, scale=3.0)
    experts, shares = route(jnp.asarray(logits), spec, jnp.asarray([0.0, 0.0, 0.0, 1.0]))
    assert experts.tolist() == [[3, 0]]
    np.testing.assert_allclose(shares, 3.0 / (1.0 + np.exp(-logits[:, [3, 0]])), rtol=1e-6)


@pytest.mark.parametrize("normalised", [False, True])
def test_softmax_weights_are_shares_of_all_experts_or_of_the_chosen(normalised: bool) -> None:
    logits = np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32)
    experts, shares = route(jnp.asarray(logits), RouterSpec(8, 3, normalised=normalised))
    want = np.argsort(-logits, axis=-1)[:, :3]
    np.testing.assert_array_equal(experts, want)
    chosen = np.take_along_axis(softmax(logits), want, -1)
    np.testing.assert_allclose(shares, chosen / chosen.sum(-1, keepdims=True) if normalised else chosen, rtol=1e-5)


def test_only_experts_of_the_best_groups_are_chosen() -> None:
    # Two of the first group together are better than the single best expert of the second.
    logits = jnp.asarray([[1.0, 0.9, -5.0, 1.1, -5.0, -5.0]])
    by_pair = RouterSpec(6, 2, "sigmoid", correction=True, groups=2, top_groups=1, group_top=2)
    assert sorted(route(logits, by_pair, jnp.zeros(6)).experts[0].tolist()) == [0, 1]
    by_best = RouterSpec(6, 2, groups=2, top_groups=1)
    assert 3 in route(logits, by_best).experts[0].tolist()


def test_equal_scores_beyond_the_sigmoid_s_range_are_told_apart() -> None:
    assert route(jnp.asarray([[40.0, 50.0]]), RouterSpec(2, 1, "sigmoid")).experts.tolist() == [[1]]
