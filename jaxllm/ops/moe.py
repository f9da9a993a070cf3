"""Mixture of experts (Shazeer et al., 2017, arXiv:1701.06538): which experts a token goes to, and their work. No token is dropped.

Tokens are sorted by expert, so that each expert's rows lie together. On CPU a loop with a dynamic trip count takes blocks of rows of one
expert, which is work in proportion to the rows: XLA's `ragged_dot` multiplies every row with every expert there, and on GPUs, which
have kernels of ours (`choose_product`). TPUs run XLA's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxllm.ops.mosaic_gpu import reason_against
from jaxllm.specs import RouterSpec
from pallas_kernels.devices import is_blackwell

# (rows [N, M] sorted by expert, matrices [E, M, F], counts [E] of rows) -> [N, F]
GroupedProduct = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
# (gate, up) -> hidden, or (up) where experts have no gate; elementwise
Gate = Callable[..., jax.Array]


class Routing(NamedTuple):
    """The experts [T, k] int32 of each token, and their weights [T, k] float32."""

    experts: jax.Array
    weights: jax.Array


class ExpertWeights(NamedTuple):
    """`gate_up` [E, N, M, 2 * F / N] in N groups as in `layers.mlp.MLP` (1 for 2 where there is no gate), its bias [E, N, 2, F / N], `down`
    [E, F, M].
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


def choose_product(platform: str, device_kind: str = "") -> GroupedProduct | None:
    """The grouped product for devices of a platform that jax calls `device_kind`; None: blocks of rows serve it better."""
    if platform == "gpu":
        from pallas_kernels.grouped_matmul import gpu, triton

        return partial(gpu.ragged_dot, blackwell=is_blackwell(device_kind)) if reason_against(device_kind) is None else triton.ragged_dot
    return None if platform == "cpu" else lax.ragged_dot


def run_experts(
    x: jax.Array, routing: Routing, weights: ExpertWeights, gate: Gate, *, weigh_inputs: bool = False, product: GroupedProduct | None = None
) -> jax.Array:
    """`RunExperts` on one device, by `product` or by blocks of rows. Experts from len(weights.down) on give nothing."""
    num_tokens, top_k = routing.experts.shape
    num_experts = len(weights.down)
    experts = routing.experts.reshape(-1)
    order = jnp.argsort(experts)
    counts = jnp.sum(experts[:, None] == jnp.arange(num_experts), axis=0)
    rows, shares = x[order // top_k], routing.weights
    if weigh_inputs:
        rows, shares = rows * shares.reshape(-1)[order][:, None].astype(x.dtype), jnp.ones_like(shares)
    out = _by_blocks(rows, counts, weights, gate) if product is None else _by_ragged_dot(rows, counts, weights, gate, product)
    # Rows past the last expert's belong to nobody: what lies there must not meet the sum, not even times zero.
    out = jnp.where(jnp.arange(len(out))[:, None] < counts.sum(), out, 0)
    by_token = out[jnp.argsort(order)].reshape(num_tokens, top_k, -1)
    return jnp.einsum("tkm,tk->tm", by_token, shares, preferred_element_type=jnp.float32).astype(x.dtype)


def _by_blocks(rows: jax.Array, counts: jax.Array, weights: ExpertWeights, gate: Gate) -> jax.Array:
    """rows [N, M], sorted by expert, to [N, M], a block of rows of one expert a turn."""
    # The rows of one token are of different experts; otherwise blocks of about the share of an expert, within what was measured to pay.
    block = 1 if len(rows) <= len(counts) // 4 else min(max(8, 1 << (len(rows) // len(counts)).bit_length()), 32)
    ends, blocks = jnp.cumsum(counts), (counts + block - 1) // block
    block_ends = jnp.cumsum(blocks)
    padded = jnp.pad(rows, ((0, block), (0, 0)))
    # As matrices outside of the loop: a reshape between the choice of an expert and its product would make a copy of its weights.
    gate_up = _matrices(weights.gate_up)

    def turn(index: jax.Array, out: jax.Array) -> jax.Array:
        expert = jnp.sum(block_ends <= index)
        start = ends[expert] - counts[expert] + (index - block_ends[expert] + blocks[expert]) * block
        both = _grouped(lax.dynamic_slice_in_dim(padded, start, block) @ gate_up[expert], weights)
        if weights.gate_up_bias is not None:
            both = both + weights.gate_up_bias[expert]
        y = _hidden(both, gate) @ weights.down[expert]
        # What a block writes past its expert's rows, the next block overwrites.
        return lax.dynamic_update_slice_in_dim(out, y, start, axis=0)

    return lax.fori_loop(0, block_ends[-1], turn, jnp.zeros_like(padded))[: len(rows)]


def _by_ragged_dot(rows: jax.Array, counts: jax.Array, weights: ExpertWeights, gate: Gate, dot: GroupedProduct) -> jax.Array:
    """rows [N, M], sorted by expert, to [N, M]; `dot` as `lax.ragged_dot`."""
    both = _grouped(dot(rows, _matrices(weights.gate_up), counts), weights)
    if weights.gate_up_bias is not None:
        expert = jnp.sum(jnp.cumsum(counts) <= jnp.arange(len(rows))[:, None], axis=1)
        both = both + jnp.take(weights.gate_up_bias, expert, axis=0, mode="clip")
    return dot(_hidden(both, gate), weights.down, counts)


def _matrices(gate_up: jax.Array) -> jax.Array:
    """[E, N, M, 2 * F / N] as [E, M, 2 * F]; free for one group, which is what a device has."""
    num_experts, _, width = gate_up.shape[:3]
    return jnp.moveaxis(gate_up, 1, 2).reshape(num_experts, width, -1)


def _grouped(both: jax.Array, weights: ExpertWeights) -> jax.Array:
    """[rows, 2 * F] as [rows, N, 2, F / N]."""
    groups, part = weights.gate_up.shape[1], weights.down.shape[1] // weights.gate_up.shape[1]
    return both.reshape(len(both), groups, -1, part)


def _hidden(both: jax.Array, gate: Gate) -> jax.Array:
    """[rows, N, 2, F / N] to [rows, F]."""
    return gate(*(both[:, :, i] for i in range(both.shape[2]))).reshape(len(both), -1)


def sharded_experts(mesh: Mesh, *, experts_axis: str, width_axis: str) -> RunExperts:
    """`run_experts` with the experts of `weights` split over one mesh axis and their widths over another.

    Tensor parallelism splits widths, not experts: each device then does the same share of each token's work, whatever the routing, and
    reads the same share of each expert's weights.
    """
    device = mesh.devices.flat[0]
    run_local = partial(run_experts, product=choose_product(device.platform, device.device_kind))
    split, everywhere = PartitionSpec(experts_axis, width_axis), PartitionSpec()

    def run(x: jax.Array, routing: Routing, weights: ExpertWeights, gate: Gate, *, weigh_inputs: bool = False) -> jax.Array:
        def local(x: jax.Array, routing: Routing, weights: ExpertWeights) -> jax.Array:
            num_experts = len(weights.down)
            mine = routing.experts - lax.axis_index(experts_axis) * num_experts
            mine = jnp.where((mine >= 0) & (mine < num_experts), mine, num_experts)
            out = run_local(x, routing._replace(experts=mine), weights, gate, weigh_inputs=weigh_inputs)
            return lax.psum(out, (experts_axis, width_axis))

        sharded = jax.shard_map(local, mesh=mesh, in_specs=(everywhere, everywhere, split), out_specs=everywhere, check_vma=False)
        return sharded(x, routing, weights)

    return run if mesh.size > 1 else run_local
