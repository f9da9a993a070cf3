"""Mixture of experts (Shazeer et al., 2017, arXiv:1701.06538): which experts a token goes to, and their work. No token is dropped.

Tokens are sorted by expert, so that each expert's rows lie together. On CPU a loop with a dynamic trip count takes blocks of rows of one
expert, which is work in proportion to the rows: `ragged_dot` multiplies every row with every expert there. Accelerators run `ragged_dot`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxllm.ops.linear import linear
from jaxllm.specs import RouterSpec

# On CPU, experts with so many rows take them one by one: XLA then reads the weights where they lie, while it copies those of a block.
_SINGLE_ROWS = 3

# (gate, up) -> hidden, or (up) where experts have no gate; elementwise
Gate = Callable[..., jax.Array]


class Routing(NamedTuple):
    """The experts [T, k] int32 of each token, and their weights [T, k] float32."""

    experts: jax.Array
    weights: jax.Array


class ExpertWeights(NamedTuple):
    """`gate_up` [E, N, 2, F / N, M] in N groups as in `layers.mlp.MLP` (1 for 2 where there is no gate), its bias [E, N, 2, F / N], `down`
    [E, M, F].
    """

    gate_up: jax.Array
    gate_up_bias: jax.Array | None
    down: jax.Array


class RunExperts(Protocol):
    """The weighted sum of the experts of each token; with `weigh_inputs`, their sum over weighted inputs."""

    def __call__(self, x: jax.Array, routing: Routing, weights: ExpertWeights, gate: Gate, *, weigh_inputs: bool = False) -> jax.Array:
        """x [T, M] to [T, M]."""
        ...


def route(logits: jax.Array, spec: RouterSpec, correction: jax.Array | None = None) -> Routing:
    """logits [T, E] float32 and the correction [E] of the choice to the experts of each token."""
    if spec.scores == "sparsemixer":
        return _sparsemixer(logits, spec)
    scores = jax.nn.sigmoid(logits) if spec.scores == "sigmoid" else jax.nn.softmax(logits, axis=-1)
    # The order of scores is that of logits, which do not saturate.
    choice = logits if correction is None else scores + correction
    if spec.top_groups < spec.groups:
        groups = choice.reshape(len(choice), spec.groups, -1)
        best = lax.top_k(groups, spec.group_top)[0].sum(-1)
        kept = jax.nn.one_hot(lax.top_k(best, spec.top_groups)[1], spec.groups, dtype=jnp.bool_).any(axis=1)
        choice = jnp.where(kept[..., None], groups, -jnp.inf).reshape(choice.shape)
    experts = lax.top_k(choice, spec.top_k)[1]
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if spec.normalised:
        weights = weights / jnp.maximum(weights.sum(-1, keepdims=True), spec.least_sum)
    return Routing(experts, weights * spec.scale)


def _sparsemixer(logits: jax.Array, spec: RouterSpec) -> Routing:
    """SparseMixer-v2 (Liu et al., 2024, arXiv:2409.12136) without its noise: one expert after the other, each weighted by a softmax over
    the experts close to it.
    """
    left, experts, weights = logits, [], []
    for _ in range(spec.top_k):
        best = left.max(-1, keepdims=True)
        far = (best - logits) / jnp.maximum(jnp.abs(logits), best) > 2 * spec.jitter
        expert = left.argmax(-1)
        experts.append(expert)
        shares = jax.nn.softmax(jnp.where(far, -jnp.inf, left), axis=-1)
        weights.append(jnp.take_along_axis(shares, expert[:, None], axis=-1)[:, 0])
        left = jnp.where(jax.nn.one_hot(expert, left.shape[-1], dtype=jnp.bool_), -jnp.inf, left)
    return Routing(jnp.stack(experts, axis=-1), jnp.stack(weights, axis=-1))


def run_experts(x: jax.Array, routing: Routing, weights: ExpertWeights, gate: Gate, *, weigh_inputs: bool = False) -> jax.Array:
    """`RunExperts` on one device. Experts from len(weights.down) on give nothing."""
    num_tokens, top_k = routing.experts.shape
    num_experts = len(weights.down)
    experts = routing.experts.reshape(-1)
    order = jnp.argsort(experts)
    counts = jnp.sum(experts[:, None] == jnp.arange(num_experts), axis=0)
    rows, shares = x[order // top_k], routing.weights
    if weigh_inputs:
        rows, shares = rows * shares.reshape(-1)[order][:, None].astype(x.dtype), jnp.ones_like(shares)
    run = {"cpu": partial(_by_blocks, gate=gate), "default": partial(_by_ragged_dot, gate=gate)}
    out = lax.platform_dependent(rows, counts, weights, **run)
    # Rows past the last expert's belong to nobody: what lies there must not meet the sum, not even times zero.
    out = jnp.where(jnp.arange(len(out))[:, None] < counts.sum(), out, 0)
    by_token = out[jnp.argsort(order)].reshape(num_tokens, top_k, -1)
    return jnp.einsum("tkm,tk->tm", by_token, shares, preferred_element_type=jnp.float32).astype(x.dtype)


def _by_blocks(rows: jax.Array, counts: jax.Array, weights: ExpertWeights, gate: Gate) -> jax.Array:
    """rows [N, M], sorted by expert, to [N, M], a block of rows of one expert a turn."""
    block = min(max(8, 1 << (len(rows) // len(counts)).bit_length()), 32)
    ends = jnp.cumsum(counts)
    padded = jnp.pad(rows, ((0, block), (0, 0)))

    def loop(out: jax.Array, block: int, counts: jax.Array, project: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
        """Fill `out` at the rows of experts that have `counts`."""
        blocks = (counts + block - 1) // block
        block_ends = jnp.cumsum(blocks)

        def turn(index: jax.Array, out: jax.Array) -> jax.Array:
            expert = jnp.sum(block_ends <= index)
            start = ends[expert] - counts[expert] + (index - block_ends[expert] + blocks[expert]) * block
            groups, parts, part, width = weights.gate_up.shape[1:]
            both = project(lax.dynamic_slice_in_dim(padded, start, block), weights.gate_up[expert].reshape(-1, width))
            both = both.reshape(block, groups, parts, part)
            if weights.gate_up_bias is not None:
                both = both + weights.gate_up_bias[expert]
            y = project(gate(*(both[:, :, i] for i in range(parts))).reshape(block, -1), weights.down[expert])
            # What a block writes past its expert's rows, a later turn overwrites.
            return lax.dynamic_update_slice_in_dim(out, y, start, axis=0)

        return lax.fori_loop(0, block_ends[-1], turn, out)

    out = loop(jnp.zeros_like(padded), block, jnp.where(counts > _SINGLE_ROWS, counts, 0), linear)
    return loop(out, 1, jnp.where(counts > _SINGLE_ROWS, 0, counts), lambda x, w: x @ w.T)[: len(rows)]


def _by_ragged_dot(rows: jax.Array, counts: jax.Array, weights: ExpertWeights, gate: Gate) -> jax.Array:
    """rows [N, M], sorted by expert, to [N, M]."""
    num_experts, groups, parts, part, width = weights.gate_up.shape
    both = _ragged(rows, weights.gate_up.reshape(num_experts, -1, width), counts).reshape(-1, groups, parts, part)
    if weights.gate_up_bias is not None:
        expert = jnp.sum(jnp.cumsum(counts) <= jnp.arange(len(rows))[:, None], axis=1)
        both = both + jnp.take(weights.gate_up_bias, expert, axis=0, mode="clip")
    return _ragged(gate(*(both[:, :, i] for i in range(parts))).reshape(len(rows), -1), weights.down, counts)


def _ragged(rows: jax.Array, weight: jax.Array, counts: jax.Array) -> jax.Array:
    """rows [N, in] times the weight [E, out, in] of their experts."""
    dims = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
    )
    return lax.ragged_dot_general(rows, weight, counts, dims, preferred_element_type=rows.dtype)


def sharded_experts(mesh: Mesh, *, experts_axis: str, width_axis: str) -> RunExperts:
    """`run_experts` with the experts of `weights` split over one mesh axis and their widths over another.

    Tensor parallelism splits widths, not experts: each device then does the same share of each token's work, whatever the routing, and
    reads the same share of each expert's weights.
    """
    by_group, by_input = PartitionSpec(experts_axis, width_axis), PartitionSpec(experts_axis, None, width_axis)
    weight_specs: Any = {"gate_up": by_group, "gate_up_bias": by_group, "down": by_input}

    def run(x: jax.Array, routing: Routing, weights: ExpertWeights, gate: Gate, *, weigh_inputs: bool = False) -> jax.Array:
        def local(x: jax.Array, routing: Routing, weights: ExpertWeights) -> jax.Array:
            num_experts = len(weights.down)
            mine = routing.experts - lax.axis_index(experts_axis) * num_experts
            mine = jnp.where((mine >= 0) & (mine < num_experts), mine, num_experts)
            out = run_experts(x, routing._replace(experts=mine), weights, gate, weigh_inputs=weigh_inputs)
            return lax.psum(out, (experts_axis, width_axis))

        everywhere = PartitionSpec()
        sharded = jax.shard_map(
            local, mesh=mesh, in_specs=(everywhere, everywhere, ExpertWeights(**weight_specs)), out_specs=everywhere, check_vma=False
        )
        return sharded(x, routing, weights)

    return run if mesh.size > 1 else run_experts
