"""Paged attention in plain XLA, with work proportional to real lengths: the CPU path, and a fallback on every platform.

Both halves are online softmax (Milakov and Gimelshein, arXiv 1805.02867; as in FlashAttention, arXiv 2205.14135) over blocks of keys in
`while` loops whose trip counts come from the lengths of the step:

- decodes: the pages of all decode rows form one flat work list; each turn takes a fixed number of pages, whatever rows they are of.
- prompt chunks: tiles of consecutive queries of one row, each against blocks of that row's pages.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxllm.ops.attention.metadata import AttentionMetadata, LayerCache, first_visible, position_bias, write_pages
from jaxllm.specs import AttendSpec, CacheLayer

_MASKED = -1e30
# Measured on CPU: large tiles gather the pages of a long chunk less often, small ones waste less on what is short.
_LARGE_TILE, _SMALL_TILE = 512, 64
_KEY_BLOCK = 256
_DECODE_BLOCK = 1024  # positions a turn of the decode loop covers, at most


def attend(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    cache: LayerCache,
    metadata: AttentionMetadata,
    spec: AttendSpec,
    sinks: jax.Array | None = None,
    bias: jax.Array | None = None,
) -> tuple[jax.Array, LayerCache]:
    """q [T, H, D], k and v [T, K, D], sinks [H]; returns ([T, H, D], cache). Padding tokens get finite values of no meaning.

    T == R means a step of decodes only: no prompt code is traced then.
    """
    cache = write_pages(cache, k, v, metadata)
    num_rows = metadata.num_rows
    if metadata.num_tokens == num_rows:
        return _decode(q, cache, metadata, spec, sinks, bias), cache
    padded = jnp.pad(_decode(q[:num_rows], cache, metadata, spec, sinks, bias), ((0, q.shape[0] - num_rows), (0, 0), (0, 0)))
    return _prefill(q, padded, cache, metadata, spec, sinks, bias), cache


def cache_shapes(num_pages: int, page_size: int, layer: CacheLayer, dtype: jnp.dtype) -> LayerCache:
    """Abstract arrays of one layer's pages."""
    k: Any = jax.ShapeDtypeStruct((num_pages, layer.num_kv_heads, layer.head_dim, page_size), dtype)
    v: Any = jax.ShapeDtypeStruct((num_pages, layer.num_kv_heads, page_size, layer.head_dim), dtype)
    return LayerCache(k, v if layer.attend.latent is None else None)


class _Partial(NamedTuple):
    """An unfinished softmax: running maximum, sum of exponentials, and weighted sum of values (float32)."""

    top: jax.Array
    total: jax.Array
    acc: jax.Array

    @classmethod
    def empty(cls, shape: tuple[int, ...], head_dim: int, sinks: jax.Array | None) -> _Partial:
        """Nothing seen yet but the sinks (broadcast to `shape`), which have weight one and no value."""
        acc = jnp.zeros((*shape, head_dim))
        if sinks is None:
            return cls(jnp.full(shape, _MASKED), jnp.zeros(shape), acc)
        return cls(jnp.broadcast_to(sinks.astype(jnp.float32), shape), jnp.ones(shape), acc)

    def value(self) -> jax.Array:
        return self.acc / jnp.maximum(self.total, 1e-30)[..., None]


def _scores(q: jax.Array, k: jax.Array, spec: AttendSpec) -> jax.Array:
    """Batched [..., M, D] x [..., D, N] -> [..., M, N] in float32, scaled and capped."""
    scores = jnp.matmul(q, k, preferred_element_type=jnp.float32) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * jnp.tanh(scores / spec.softcap)
    return scores


def _decode(
    q: jax.Array,
    cache: LayerCache,
    metadata: AttentionMetadata,
    spec: AttendSpec,
    sinks: jax.Array | None,
    bias: jax.Array | None,
) -> jax.Array:
    """q [R, H, D], one query a row; rows past num_decodes give zeros. Returns [R, H, D]."""
    num_rows, num_heads, head_dim = q.shape
    num_kv, size = cache.k.shape[1], cache.page_size
    value_dim = spec.latent or head_dim
    width = max(1, min(_DECODE_BLOCK // size, 4 * num_rows))  # pages a turn

    rows = jnp.arange(num_rows)
    lens = jnp.where(rows < metadata.num_decodes, metadata.kv_lens, 0)
    first_position = first_visible(jnp.maximum(lens - 1, 0), spec)
    first_page = first_position // size
    ends = jnp.cumsum((lens + size - 1) // size - first_page)  # where each row's share of the work list ends
    grouped = q.reshape(num_rows, num_kv, num_heads // num_kv, head_dim)

    def turn(carry: tuple[jax.Array, _Partial]) -> tuple[jax.Array, _Partial]:
        start, state = carry
        item = start + jnp.arange(width)
        row = jnp.minimum(jnp.sum(ends[None, :] <= item[:, None], axis=1), num_rows - 1)
        index = item - jnp.where(row > 0, ends[row - 1], 0) + first_page[row]
        page = metadata.page_table[row, jnp.minimum(index, metadata.page_table.shape[1] - 1)]
        scores = _scores(grouped[row], cache.k[page].astype(q.dtype), spec)  # [W, K, G, S]

        position = index[:, None] * size + jnp.arange(size)
        if bias is not None:
            added = position_bias(bias, position - lens[row][:, None] + 1)
            scores += jnp.moveaxis(added, 0, 1).reshape(scores.shape)
        listed = item < ends[-1]
        visible = (position < lens[row][:, None]) & (position >= first_position[row][:, None]) & listed[:, None]
        scores = jnp.where(visible[:, None, None], scores, _MASKED)
        top = scores.max(-1)
        weights = jnp.exp(scores - top[..., None])
        values = cache.values(page, spec).astype(q.dtype)
        acc = jnp.matmul(weights.astype(q.dtype), values, preferred_element_type=jnp.float32)

        # Several items of a turn may be of one row: merge them into the rows by a one-hot product.
        owned = (row[:, None] == rows) & listed[:, None]  # [W, R]
        top, total = top.reshape(width, num_heads), weights.sum(-1).reshape(width, num_heads)
        row_top = jnp.maximum(state.top, jnp.max(jnp.where(owned[..., None], top[:, None], _MASKED), axis=0))
        item_scale = jnp.exp(top - row_top[row])
        row_scale = jnp.exp(state.top - row_top)
        share = owned.astype(jnp.float32).T  # [R, W]
        acc = acc.reshape(width, num_heads, value_dim) * item_scale[..., None]
        # A query that is not a number stays in its own row: zero times NaN would spread it over the product.
        acc, total = (jnp.where(jnp.isfinite(x), x, 0) for x in (acc, total * item_scale))
        merged = share @ acc.reshape(width, -1)
        return start + width, _Partial(
            top=row_top,
            total=state.total * row_scale + share @ total,
            acc=state.acc * row_scale[..., None] + merged.reshape(state.acc.shape),
        )

    empty = _Partial.empty((num_rows, num_heads), value_dim, sinks)
    _, state = lax.while_loop(lambda carry: carry[0] < ends[-1], turn, (jnp.int32(0), empty))
    return state.value().astype(q.dtype)


def _prefill(
    q: jax.Array,
    out: jax.Array,
    cache: LayerCache,
    metadata: AttentionMetadata,
    spec: AttendSpec,
    sinks: jax.Array | None,
    bias: jax.Array | None,
) -> jax.Array:
    """Fill `out` [T, H, D] at the tokens of rows from num_decodes on; q [T, H, D]. Each row is cut into large tiles, and its rest into
    small ones.
    """
    num_tokens = q.shape[0]
    small = min(_SMALL_TILE, num_tokens)
    q_lens = metadata.q_starts[1:] - metadata.q_starts[:-1]
    q_lens = jnp.where(jnp.arange(metadata.num_rows) >= metadata.num_decodes, q_lens, 0)
    num_large = q_lens // _LARGE_TILE
    base = num_large * _LARGE_TILE
    # A small tile may reach past its row. What it writes there is overwritten by the next row's tiles, which come later (large ones last,
    # since they end within their row), or lies in this padding.
    q, out = (jnp.pad(x, ((0, small), (0, 0), (0, 0))) for x in (q, out))
    out = _fill_tiles(q, out, cache, metadata, spec, sinks, bias, small, (q_lens - base + small - 1) // small, base)
    if num_tokens >= _LARGE_TILE:
        out = _fill_tiles(q, out, cache, metadata, spec, sinks, bias, _LARGE_TILE, num_large, jnp.zeros_like(base))
    return out[:num_tokens]


def _fill_tiles(
    q: jax.Array,
    out: jax.Array,
    cache: LayerCache,
    metadata: AttentionMetadata,
    spec: AttendSpec,
    sinks: jax.Array | None,
    bias: jax.Array | None,
    tile: int,
    counts: jax.Array,
    bases: jax.Array,
) -> jax.Array:
    """Fill `out` [T', H, D] at counts [R] tiles of `tile` tokens a row, from its token bases [R] on; q [T', H, D]."""
    _, num_heads, head_dim = q.shape
    num_kv, size = cache.k.shape[1], cache.page_size
    value_dim = spec.latent or head_dim
    num_rows, group = metadata.num_rows, num_heads // num_kv
    pages_per_block = max(1, min(_KEY_BLOCK // size, metadata.page_table.shape[1]))
    block = pages_per_block * size
    q_lens = metadata.q_starts[1:] - metadata.q_starts[:-1]
    ends = jnp.cumsum(counts)
    table = jnp.pad(metadata.page_table, ((0, 0), (0, pages_per_block)))

    def one_tile(index: jax.Array, out: jax.Array) -> jax.Array:
        row = jnp.minimum(jnp.sum(ends <= index), num_rows - 1)
        offset = bases[row] + (index - jnp.where(row > 0, ends[row - 1], 0)) * tile
        start = metadata.q_starts[row] + offset
        queries = lax.dynamic_slice_in_dim(q, start, tile).reshape(tile, num_kv, group, head_dim)
        queries = queries.transpose(1, 2, 0, 3).reshape(num_kv, group * tile, head_dim)
        first = metadata.kv_lens[row] - q_lens[row] + offset  # position of the tile's first query
        position = first + jnp.arange(tile)
        last = jnp.minimum(first + tile, metadata.kv_lens[row])
        if not spec.causal:
            last = metadata.kv_lens[row]
            first, position = last - 1, jnp.full(tile, last - 1)
        low = first_visible(first, spec)

        def one_block(turn: jax.Array, state: _Partial) -> _Partial:
            page = lax.dynamic_slice(table, (row, turn * pages_per_block), (1, pages_per_block))[0]
            keys = cache.k[page].astype(q.dtype).transpose(1, 2, 0, 3).reshape(num_kv, head_dim, block)
            values = cache.values(page, spec).astype(q.dtype).transpose(1, 0, 2, 3).reshape(num_kv, block, value_dim)
            key_position = turn * block + jnp.arange(block)
            visible = key_position[None] <= position[:, None]
            if spec.window is not None:
                visible &= key_position[None] >= first_visible(position, spec)[:, None]
            scores = _scores(queries, keys, spec).reshape(num_kv, group, tile, block)
            if bias is not None:
                scores += position_bias(bias, key_position[None] - position[:, None]).reshape(scores.shape)
            scores = jnp.where(visible, scores, _MASKED).reshape(num_kv, group * tile, block)
            top = jnp.maximum(state.top, scores.max(-1))
            weights = jnp.exp(scores - top[..., None])
            if spec.window is not None:
                # A query that sees nothing of this block must not count its masked scores as weight one.
                weights = jnp.where(scores > _MASKED / 2, weights, 0.0)
            scale = jnp.exp(state.top - top)
            acc = jnp.matmul(weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
            return _Partial(top, state.total * scale + weights.sum(-1), state.acc * scale[..., None] + acc)

        by_query = None if sinks is None else jnp.repeat(sinks.reshape(num_kv, group), tile, axis=1)
        empty = _Partial.empty((num_kv, group * tile), value_dim, by_query)
        state = lax.fori_loop(low // block, (last + block - 1) // block, one_block, empty)
        result = state.value().reshape(num_kv, group, tile, value_dim).transpose(2, 0, 1, 3).reshape(tile, num_heads, value_dim)
        return lax.dynamic_update_slice_in_dim(out, result.astype(out.dtype), start, axis=0)

    return lax.fori_loop(0, ends[-1], one_tile, out)
