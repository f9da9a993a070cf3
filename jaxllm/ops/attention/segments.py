"""Attention within segments of one flat batch, without pages: every token of a sequence is in the step.

Tiles of queries lie in the batch whatever segments they cut; what a tile may see is one stretch of the batch, since segments are
consecutive, so a tile goes over the key blocks of that stretch (online softmax, arXiv 1805.02867) and masks what belongs to other
segments. Short segments therefore share tiles, and long ones cost their own length only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxllm.errors import ConfigError
from jaxllm.ops.attention.metadata import position_bias
from jaxllm.specs import AttendSpec

_TILE = 128
_MASKED = -1e30


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Segments:
    """The segments of a step; their tokens are consecutive, padding tokens come last.

    rows: [T] int32, segment of each token, R for padding tokens.
    firsts, ends: [T] int32, the first token of each token's segment, and one past its last.
    num_tokens: [] int32, without the padding.
    """

    rows: jax.Array
    firsts: jax.Array
    ends: jax.Array
    num_tokens: jax.Array

    @classmethod
    def of(cls, starts: jax.Array, num_tokens: int) -> Segments:
        """Those of a step of `num_tokens`, padding included, from the first token of each row and the end of the last: starts [R + 1]."""
        index, num_rows = jnp.arange(num_tokens), len(starts) - 1
        rows = jnp.sum(starts[None, 1:] <= index[:, None], axis=1).astype(jnp.int32)
        row, real = jnp.minimum(rows, num_rows - 1), rows < num_rows
        return cls(rows, jnp.where(real, starts[row], index), jnp.where(real, starts[row + 1], index), starts[-1])


def attend_segments(
    segments: Segments,
    mesh: Mesh,
    heads_axis: str,
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    cache: Any,
    spec: AttendSpec,
    sinks: jax.Array | None = None,
    bias: jax.Array | None = None,
) -> tuple[jax.Array, Any]:
    """q [T, H, D], k and v [T, K, D], bias [H, N] with their heads split over `heads_axis`; returns ([T, H, D], (k, v)). Without k and v,
    those of another layer are the cache. Padding tokens get zeros.

    The output of a token whose k or v is not finite is NaN, and no other segment's is: see `AttentionBackend.attend`.

    Raises:
        ConfigError: attention that there is no implementation of.
    """
    if sinks is not None or spec.latent is not None or spec.chunked:
        raise ConfigError("pooling is not supported for models with attention sinks, latent or chunked attention")

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, segments: Segments, bias: jax.Array | None) -> jax.Array:
        out = _attend(q, jnp.where(jnp.isfinite(k), k, 0), jnp.where(jnp.isfinite(v), v, 0), segments, spec, bias)
        poison = (k * 0 + v * 0).astype(out.dtype)
        grouped = out.reshape(*k.shape[:2], -1, k.shape[2]) + poison[:, :, None]
        return grouped.reshape(out.shape)

    kept: Any = cache if k is None else (k, v)
    if mesh.size > 1:
        heads = PartitionSpec(None, heads_axis)
        specs = (heads, heads, heads, PartitionSpec(), PartitionSpec(heads_axis))
        attend = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=heads, check_vma=False)
    return attend(q, kept[0], kept[1], segments, bias), kept


def _attend(q: jax.Array, k: jax.Array, v: jax.Array, segments: Segments, spec: AttendSpec, bias: jax.Array | None) -> jax.Array:
    num_tokens, num_heads, dim = q.shape
    num_kv = k.shape[1]
    group = num_heads // num_kv
    tile = min(_TILE, num_tokens)
    padding = -num_tokens % tile
    q, k, v = (jnp.pad(x, ((0, padding), (0, 0), (0, 0))) for x in (q, k, v))
    rows = jnp.pad(segments.rows, (0, padding), constant_values=-1)
    firsts, ends = (jnp.pad(x, (0, padding), mode="edge") for x in (segments.firsts, segments.ends))
    # Heads first, so that a tile and a block are plain matrices.
    q = q.reshape(-1, num_kv, group, dim).transpose(1, 2, 0, 3)
    k, v = k.transpose(1, 2, 0), v.transpose(1, 0, 2)
    reach = num_tokens if spec.window is None else spec.window

    def one_tile(number: jax.Array, out: jax.Array) -> jax.Array:
        start = number * tile
        query = start + jnp.arange(tile)
        query_rows = lax.dynamic_slice_in_dim(rows, start, tile)
        queries = lax.dynamic_slice_in_dim(q, start, tile, axis=2).reshape(num_kv, group * tile, dim)
        low = jnp.maximum(firsts[start], start - reach + 1)
        high = start + tile if spec.causal else jnp.minimum(ends[start + tile - 1], start + tile - 1 + reach)

        def one_block(number: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            top, total, acc = state
            at = number * tile
            distance = query[:, None] - (at + jnp.arange(tile))[None]
            visible = query_rows[:, None] == lax.dynamic_slice_in_dim(rows, at, tile)[None]
            visible &= (distance < reach) & (distance > (-1 if spec.causal else -reach))
            scores = jnp.matmul(queries, lax.dynamic_slice_in_dim(k, at, tile, axis=2), preferred_element_type=jnp.float32) * spec.scale
            if spec.softcap is not None:
                scores = spec.softcap * jnp.tanh(scores / spec.softcap)
            scores = scores.reshape(num_kv, group, tile, tile)
            if bias is not None:
                scores += position_bias(bias, -distance).reshape(scores.shape)
            scores = jnp.where(visible, scores, _MASKED).reshape(num_kv, group * tile, tile)
            new_top = jnp.maximum(top, scores.max(-1))
            # A query that sees nothing of this block must not count its masked scores as weight one.
            weights = jnp.where(scores > _MASKED / 2, jnp.exp(scores - new_top[..., None]), 0.0)
            values = lax.dynamic_slice_in_dim(v, at, tile, axis=1)
            product = jnp.matmul(weights.astype(v.dtype), values, preferred_element_type=jnp.float32)
            rescale = jnp.exp(top - new_top)
            return new_top, total * rescale + weights.sum(-1), acc * rescale[..., None] + product

        shape = (num_kv, group * tile)
        empty = jnp.full(shape, _MASKED), jnp.zeros(shape), jnp.zeros((*shape, dim))
        _, total, acc = lax.fori_loop(low // tile, (high + tile - 1) // tile, one_block, empty)
        result = (acc / jnp.maximum(total, 1e-30)[..., None]).reshape(num_kv, group, tile, dim)
        return lax.dynamic_update_slice_in_dim(out, result.astype(out.dtype), start, axis=2)

    out = lax.fori_loop(0, (segments.num_tokens + tile - 1) // tile, one_tile, jnp.zeros_like(q))
    return out.transpose(2, 0, 1, 3).reshape(-1, num_heads, dim)[:num_tokens]
