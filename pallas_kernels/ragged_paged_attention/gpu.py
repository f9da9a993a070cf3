"""Ragged paged attention for Hopper GPUs: a Mosaic GPU kernel, run over decodes and over tiles of prompt tokens.

A program takes one tile (some consecutive tokens of one row) and one KV head. One warpgroup fetches the pages that the tile may see, by the
tensor memory accelerator, a few pages ahead; the others hold 64 rows each (tokens x heads of the group) and run an online softmax on the
tensor cores, in base 2 (FlashAttention-3, arXiv 2407.08608). Decodes are cut over the pages as well where rows and heads do not fill
the GPU (Flash-Decoding), and merged by XLA, which also writes the step's keys and values into the pages: both are small beside the rest.

A latent (`reference.py`) has one page for keys and values, and heads that do not fit 64 rows go to more programs. Its accumulators are too
wide for one warpgroup: two share the rows, each with half of the columns (as FlashMLA does); both compute the scores, which costs products,
of which decodes have plenty to spare, but no exchange. Its prompts, absorbed as well, run by tiles of 64 rows.

Pages are k [N, K, D, S] and v [N, K, S, D], the layout of plain XLA attention, so that shapes that this kernel refuses can go there.
Masked positions have weight zero, but are multiplied: what lies in pages must be finite. Dims are those of `reference.py`; G = H / K.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.ragged_paged_attention.layout import UnsupportedShapeError

_MASKED = -1e30
_FLOOR = -1e29  # running maxima start here, far above masked scores, whose weights then are zero
_LOG2E = math.log2(math.e)
_WARPGROUP_ROWS = 64  # of a wgmma
_PREFILL_WARPGROUPS = 2
_SHARED_MEMORY = 227 * 1024  # of a block; two blocks fit a multiprocessor with half of it each
_RESERVED = 4096  # of a block, for barriers and reductions
_MAX_STAGES = 6
_MULTIPROCESSORS = 132  # to choose how decodes are cut; any Hopper has about as many

Pages = tuple[jax.Array, jax.Array | None]


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    cache: Pages,
    page_table: jax.Array,
    q_starts: jax.Array,
    kv_lens: jax.Array,
    num_decodes: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    latent: int | None = None,
    splits: int | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, Pages]:
    """As `reference.attend`, with pages (k, v), or (k, None) of a latent. T == R means a step of decodes only.

    Args:
        splits: parts that each decode is cut into; None chooses by the shape.
        interpret: `InterpretGPUParams` to run without a GPU.

    Raises:
        UnsupportedShapeError: see `check_shape`.
    """
    num_tokens, num_heads, head_dim = q.shape
    check_shape(q.dtype, num_heads, k.shape[1], head_dim, cache[0].shape[3], latent)
    num_kv = k.shape[1] if latent is None else -(-num_heads // _WARPGROUP_ROWS)
    group = num_heads // num_kv
    cache = _write(k, v, cache, page_table, q_starts, kv_lens)
    call = _Call(group, scale, window, softcap, latent, interpret)
    grouped = q.reshape(num_tokens, num_kv, group, head_dim)
    num_rows = page_table.shape[0]
    out = _decode(grouped[:num_rows], cache, page_table, kv_lens, num_decodes, sinks, splits, call)
    if num_tokens > num_rows:
        out = jnp.pad(out, ((0, num_tokens - num_rows), (0, 0), (0, 0), (0, 0)))
        prefilled = _prefill(grouped, cache, page_table, q_starts, kv_lens, num_decodes, sinks, call)
        out = jnp.where(jnp.arange(num_tokens)[:, None, None, None] < num_decodes, out, prefilled)
    return out.reshape(num_tokens, num_heads, -1), cache


def check_shape(dtype: Any, num_heads: int, num_kv_heads: int, head_dim: int, page_size: int, latent: int | None = None) -> None:
    """Refuse what the kernel cannot run.

    Raises:
        UnsupportedShapeError: the message says what would do.
    """
    dtype = jnp.dtype(dtype)
    if dtype.name not in ("bfloat16", "float16"):
        raise UnsupportedShapeError(f"attention in {dtype.name} is not supported by the GPU kernel; bfloat16 and float16 are")
    if latent is not None:
        if head_dim % 32 or latent % 128 or not 128 <= latent <= 512:
            raise UnsupportedShapeError(
                f"a latent of {latent} in keys of {head_dim} is not supported by the GPU kernel; 128, 256, 384, 512 in multiples of 32 are"
            )
        num_kv_heads = -(-num_heads // _WARPGROUP_ROWS)
        if num_heads % num_kv_heads:
            raise UnsupportedShapeError(
                f"{num_heads} heads of a latent are not supported by the GPU kernel; multiples of {num_kv_heads} are"
            )
    elif head_dim % (16 if head_dim <= 128 else 64) or not 16 <= head_dim <= 256:
        raise UnsupportedShapeError(f"head_dim {head_dim} is not supported by the GPU kernel; multiples of 16 up to 128, 192 and 256 are")
    if page_size not in (64, 128, 256):
        raise UnsupportedShapeError(f"pages of {page_size} positions are not supported by the GPU kernel; block_size 64, 128 or 256 is")
    if num_heads // num_kv_heads > _WARPGROUP_ROWS:
        raise UnsupportedShapeError(f"{num_heads // num_kv_heads} heads to a KV head are not supported by the GPU kernel; up to 64 are")
    if _stages(head_dim, page_size, _prefill_warpgroups(latent), latent) < 2:
        raise UnsupportedShapeError(
            f"two pages of {page_size} positions of head_dim {head_dim} do not fit shared memory; block_size={page_size // 2} would"
        )


def _prefill_warpgroups(latent: int | None) -> int:
    """How many times 64 rows a tile of prompt tokens has."""
    return _PREFILL_WARPGROUPS if latent is None else 1


def _page_bytes(head_dim: int, page_size: int, latent: int | None) -> int:
    return (2 if latent is None else 1) * page_size * head_dim * 2


def _stages(head_dim: int, page_size: int, warpgroups: int, latent: int | None) -> int:
    """Pages in shared memory at once. Decodes leave room for a second block, which computes while the first one starts or ends."""
    queries = warpgroups * _WARPGROUP_ROWS * (head_dim * 2 + 4)
    page = _page_bytes(head_dim, page_size, latent)
    half = (_SHARED_MEMORY // 2 - _RESERVED - queries) // page
    whole = (_SHARED_MEMORY - _RESERVED - queries) // page
    return min(_MAX_STAGES, half if warpgroups == 1 and half >= 2 else whole)


def shared_bytes(head_dim: int, page_size: int, *, decode: bool, latent: int | None = None) -> int:
    """Shared memory of a block for queries and pages."""
    warpgroups = 1 if decode else _prefill_warpgroups(latent)
    queries = warpgroups * _WARPGROUP_ROWS * (head_dim * 2 + 4)
    return queries + _stages(head_dim, page_size, warpgroups, latent) * _page_bytes(head_dim, page_size, latent)


def _write(k: jax.Array, v: jax.Array | None, cache: Pages, page_table: jax.Array, q_starts: jax.Array, kv_lens: jax.Array) -> Pages:
    """Store k, v [T, K, D] in their pages; padding tokens go to the sink. What is not finite becomes zero."""
    (keys, values), num_rows = cache, kv_lens.shape[0]
    size = keys.shape[3]
    token = jnp.arange(k.shape[0])
    row = jnp.sum(q_starts[None, 1:] <= token[:, None], axis=1)
    real = row < num_rows
    row = jnp.minimum(row, num_rows - 1)
    position = jnp.where(real, kv_lens[row] - (q_starts[row + 1] - token), 0)
    page = jnp.where(real, page_table[row, position // size], 0)
    keys = keys.at[page, :, :, position % size].set(jnp.where(jnp.isfinite(k), k, 0).astype(keys.dtype))
    if v is None or values is None:
        return keys, None
    return keys, values.at[page, :, position % size, :].set(jnp.where(jnp.isfinite(v), v, 0).astype(values.dtype))


@dataclass(frozen=True)
class _Call:
    """What is static of a call, for both parts."""

    group: int
    scale: float
    window: int | None
    softcap: float | None
    latent: int | None
    interpret: Any

    @property
    def columns(self) -> int:
        """Warpgroups that share 64 rows, each with its columns of the values."""
        return 1 if self.latent is None else 2


@dataclass(frozen=True)
class _Tiles:
    """Tiles of consecutive tokens of one row each; arrays [tiles] int32.

    row; position: the first token's; low and high: positions [low, high) that the tile may see, none of them where there is nothing to do.
    """

    row: jax.Array
    position: jax.Array
    low: jax.Array
    high: jax.Array

    def packed(self) -> jax.Array:
        return jnp.stack((self.row, self.position, self.low, self.high)).astype(jnp.int32)


def _decode(
    q: jax.Array,
    cache: Pages,
    page_table: jax.Array,
    kv_lens: jax.Array,
    num_decodes: jax.Array,
    sinks: jax.Array | None,
    splits: int | None,
    call: _Call,
) -> jax.Array:
    """q [R, K, G, D]; returns the same of the rows before num_decodes, and zeros."""
    num_rows, num_kv, group, _ = q.shape
    if splits is None:
        blocks = (2 if call.latent is None else 1) * _MULTIPROCESSORS
        splits = max(1, min(blocks // (num_rows * num_kv), page_table.shape[1] // 4))
    row = jnp.arange(num_rows)
    high = jnp.where(row < num_decodes, kv_lens, 0)
    low = jnp.zeros_like(high) if call.window is None else jnp.maximum(high - call.window, 0)
    tiles = _Tiles(row, jnp.maximum(high - 1, 0), low, high)
    padded = jnp.pad(q, ((0, 0), (0, 0), (0, -group % 8), (0, 0)))
    out, lse = _run(padded[:, :, None], cache, page_table, tiles, call, splits=splits)
    return _merge(out[:, :, :, 0, :group], lse[:, :, :, 0, :group], sinks)


def _prefill(
    q: jax.Array,
    cache: Pages,
    page_table: jax.Array,
    q_starts: jax.Array,
    kv_lens: jax.Array,
    num_decodes: jax.Array,
    sinks: jax.Array | None,
    call: _Call,
) -> jax.Array:
    """q [T, K, G, D]; returns the same of the tokens of rows from num_decodes on; others get values of no meaning."""
    num_tokens, num_kv, group, head_dim = q.shape
    num_rows = page_table.shape[0]
    warpgroups = _prefill_warpgroups(call.latent)
    rows = warpgroups * _WARPGROUP_ROWS
    per_tile = rows // group
    lens = jnp.where(jnp.arange(num_rows) >= num_decodes, q_starts[1:] - q_starts[:-1], 0)
    ends = jnp.cumsum(-(-lens // per_tile))
    firsts = ends - -(-lens // per_tile)
    tile = jnp.arange(num_tokens // per_tile + min(num_rows, num_tokens))
    row = jnp.minimum(jnp.sum(ends[None, :] <= tile[:, None], axis=1), num_rows - 1)
    offset = (tile - firsts[row]) * per_tile
    position = kv_lens[row] - lens[row] + offset
    low = jnp.zeros_like(position) if call.window is None else jnp.maximum(position + 1 - call.window, 0)
    high = jnp.where(tile < ends[-1], jnp.minimum(position + per_tile, kv_lens[row]), 0)
    tiles = _Tiles(row, position, jnp.minimum(low, high), high)
    tokens = jnp.minimum((q_starts[row] + offset)[:, None] + jnp.arange(per_tile), num_tokens - 1)
    tiled = q[tokens].transpose(0, 2, 1, 3, 4).reshape(tile.shape[0], num_kv, per_tile * group, head_dim)
    tiled = jnp.pad(tiled, ((0, 0), (0, 0), (0, rows - per_tile * group), (0, 0)))
    tiled = tiled.reshape(tile.shape[0], num_kv, warpgroups, _WARPGROUP_ROWS, head_dim)
    out, lse = _run(tiled, cache, page_table, tiles, call, splits=1)

    token = jnp.arange(num_tokens)
    row = jnp.minimum(jnp.sum(q_starts[None, 1:] <= token[:, None], axis=1), num_rows - 1)
    offset = token - q_starts[row]
    index = jnp.clip(firsts[row] + offset // per_tile, 0, tile.shape[0] - 1)
    at = (offset % per_tile)[:, None] * group + jnp.arange(group)

    def by_token(x: jax.Array) -> jax.Array:
        """[1, tiles, K, warpgroups, rows, ...] to [1, T, K, G, ...]."""
        x = jnp.moveaxis(x.reshape(*x.shape[:3], rows, *x.shape[5:]), 3, 2)
        return jnp.moveaxis(x[:, index[:, None], at], 3, 2)

    return _merge(by_token(out), by_token(lse), sinks)


def _merge(out: jax.Array, lse: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """Parts of one softmax: out [P, B, K, G, D] and lse [P, B, K, G] in base 2, with a sink of each head. Returns [B, K, G, D]."""
    if sinks is None and out.shape[0] == 1:
        return out[0]
    top = lse.max(0)
    sink = None if sinks is None else sinks.astype(jnp.float32).reshape(lse.shape[2:]) * _LOG2E
    if sink is not None:
        top = jnp.maximum(top, sink)
    weights = jnp.exp2(lse - top)
    total = weights.sum(0) if sink is None else weights.sum(0) + jnp.exp2(sink - top)
    return ((weights / total)[..., None] * out.astype(jnp.float32)).sum(0).astype(out.dtype)


# ---------------------------------------------------------------------------------------------------------------------- kernel


def _run(q: jax.Array, cache: Pages, page_table: jax.Array, tiles: _Tiles, call: _Call, *, splits: int) -> tuple[jax.Array, jax.Array]:
    """Attend with q [tiles, K, W, M, D]: W warpgroups of M rows each, tokens x heads of the group in this order; `splits` programs share
    the pages of a tile.

    Returns:
        [splits, tiles, K, W, M, D (or latent)], each part normalised by itself (zeros where it saw nothing), and the logarithm to base 2 of
        its sum of weights [splits, tiles, K, W, M].
    """
    num_tiles, num_kv, warpgroups, rows, head_dim = q.shape
    keys, values = cache
    size = keys.shape[3]
    stages = _stages(head_dim, size, warpgroups, call.latent)
    computing = warpgroups * call.columns

    def kernel(table, tiles, q, k, v, out, lse, *scratch):
        program = _Program(call, table, tiles, q, k, v, out, lse, *scratch, splits=splits, rows=rows, page_size=size)
        warpgroup = lax.axis_index("warpgroup")
        pl.when(warpgroup < computing)(lambda: program.compute(warpgroup, computing))
        pl.when(warpgroup == computing)(lambda: program.fetch(computing))

    swizzle = min(plgpu.find_swizzle(head_dim * 16), plgpu.find_swizzle(size * 16))
    memory = functools.partial(_shared_matrix, q.dtype)
    return plgpu.kernel(
        kernel,
        out_type=[
            jax.ShapeDtypeStruct((splits, *q.shape[:-1], call.latent or head_dim), q.dtype),
            jax.ShapeDtypeStruct((splits, *q.shape[:-1]), jnp.float32),
        ],
        scratch_types=[
            memory((warpgroups, _WARPGROUP_ROWS, head_dim), swizzle),
            memory((stages, head_dim, size), swizzle),
            None if values is None else memory((stages, size, head_dim), plgpu.find_swizzle(head_dim * 16)),
            plgpu.SMEM((warpgroups, _WARPGROUP_ROWS), jnp.float32),
            # Interpreters take the operands of products from memory only.
            None if call.interpret is None else plgpu.SMEM((computing, _WARPGROUP_ROWS, size), q.dtype),
            plgpu.Barrier(num_barriers=warpgroups),
            plgpu.Barrier(num_barriers=warpgroups, num_arrivals=call.columns),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_barriers=stages, num_arrivals=computing),
        ],
        grid=(num_tiles, num_kv, splits),
        grid_names=("tile", "head", "split"),
        num_threads=computing + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=call.interpret,
    )(page_table, tiles.packed(), q, keys, keys if values is None else values)


def _shared_matrix(dtype: Any, shape: tuple[int, ...], swizzle: int) -> Any:
    """Shared memory whose last two axes are tiled as the tensor cores read them."""
    # Newer versions of jax declare a method of these that type checkers take for abstract.
    tiling = plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize))  # type: ignore[abstract]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))  # type: ignore[abstract]


class _Program:
    """One program of the grid: its tile, and the two kinds of warpgroups that work on it."""

    def __init__(self, call, table, tiles, q, k, v, out, lse, q_smem, k_smem, v_smem, lse_smem, p_smem, *barriers, splits, rows, page_size):
        self.call, self.rows, self.size = call, rows, page_size
        self.table, self.q, self.k, self.v, self.out, self.lse = table, q, k, v, out, lse
        self.q_smem, self.k_smem, self.v_smem, self.lse_smem, self.p_smem = q_smem, k_smem, v_smem, lse_smem, p_smem
        self.q_ready, self.q_done, self.k_ready, self.v_ready, self.consumed = barriers
        self.tile, self.head, self.split = (lax.axis_index(name) for name in ("tile", "head", "split"))
        self.row, self.position, low, self.high = (tiles[field, self.tile] for field in range(4))
        first = lax.div(low, jnp.int32(page_size))
        last = lax.div(self.high + (page_size - 1), jnp.int32(page_size))
        share = lax.div(last - first + (splits - 1), jnp.int32(splits))
        self.begin = jnp.minimum(first + self.split * share, last)  # pages of this program
        self.end = jnp.minimum(self.begin + share, last)
        self.stages = k_smem.shape[0]

    def _slot(self, page: Any) -> Any:
        return lax.rem(page - self.begin, jnp.int32(self.stages))

    def fetch(self, computing: int) -> None:
        """Bring the queries, and the pages, each as soon as its slot is free."""
        if computing > 1:
            plgpu.set_max_registers(40, action="decrease")
        for i in range(self.q_smem.shape[0]):
            target = self.q_smem.at[i, pl.ds(0, self.rows)]
            plgpu.copy_gmem_to_smem(self.q.at[self.tile, self.head, i], target, self.q_ready.at[i])

        def one(page: Any, _: None) -> None:
            slot = self._slot(page)
            self.wait_until_free(page)
            page_id = self.table[self.row, page]
            head = self.head if self.v_smem is not None else 0
            plgpu.copy_gmem_to_smem(self.k.at[page_id, head], self.k_smem.at[slot], self.k_ready.at[slot])
            if self.v_smem is not None:
                plgpu.copy_gmem_to_smem(self.v.at[page_id, self.head], self.v_smem.at[slot], self.v_ready.at[slot])

        lax.fori_loop(self.begin, self.end, one, None)

    def wait_until_free(self, page: Any) -> None:
        """Wait until the page that had the slot before this one was consumed."""
        pl.when(page >= self.begin + self.stages)(lambda: plgpu.barrier_wait(self.consumed.at[self._slot(page)]))

    def compute(self, warpgroup: Any, computing: int) -> None:
        """Attend with the 64 query rows of a warpgroup, and write what came of the first `rows` in its columns."""
        if computing > 1:
            plgpu.set_max_registers(232, action="increase")
        group: Any = warpgroup
        column: Any = 0
        if self.call.columns > 1:
            group, column = (part(warpgroup, jnp.int32(self.call.columns)) for part in (lax.div, lax.rem))
        num_columns = self.out.shape[-1] // self.call.columns
        start = column * num_columns
        plgpu.barrier_wait(self.q_ready.at[group])

        state = self._start(num_columns)
        for first, last, masked in self._stretches():
            state = lax.fori_loop(first, last, functools.partial(self._step, warpgroup, group, start, masked=masked), state)
        top, total, acc = state
        self.wait_for_queries(group)
        total = jnp.maximum(total, 1e-30)
        value = acc * lax.broadcast_in_dim(1 / total, acc.shape, [0])
        self.q_smem[group, :, pl.ds(start, num_columns)] = value.astype(self.q_smem.dtype)
        target = (self.split, self.tile, self.head, group)
        used = pl.ds(0, self.rows)

        def write_lse() -> None:
            self.lse_smem[group] = top + jnp.log(total) * _LOG2E
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(self.lse_smem.at[group, used], self.lse.at[target])

        pl.when(column == 0)(write_lse)
        plgpu.commit_smem()
        columns = pl.ds(start, num_columns)
        together = self.rows if num_columns == self.q_smem.shape[-1] else 8  # a copy is of whole rows, or within a row of tiles
        for row in range(0, self.rows, together):
            rows = pl.ds(row, together)
            plgpu.copy_smem_to_gmem(self.q_smem.at[group, rows, columns], self.out.at[(*target, rows, columns)])
        plgpu.wait_smem_to_gmem(0)

    def wait_for_queries(self, group: Any) -> None:
        """Wait until nobody reads the queries any more: outputs take their place."""
        plgpu.barrier_arrive(self.q_done.at[group])
        plgpu.barrier_wait(self.q_done.at[group])

    def _stretches(self) -> list[tuple[Any, Any, bool]]:
        """Stretches of pages, and whether they need a mask: those that every query sees in full do not."""
        if self.call.latent is not None:
            return [(self.begin, self.end, True)]  # masks cost less than the registers of more loops
        whole = jnp.clip(lax.div(self.position + 1, jnp.int32(self.size)), self.begin, self.end)
        if self.call.window is None:
            return [(self.begin, whole, False), (whole, self.end, True)]
        behind = jnp.maximum(self.high - self.call.window, 0)
        inside = jnp.clip(lax.div(behind + (self.size - 1), jnp.int32(self.size)), self.begin, self.end)
        whole = jnp.maximum(whole, inside)
        return [(self.begin, inside, True), (inside, whole, False), (whole, self.end, True)]

    def _start(self, num_columns: int) -> Any:
        """Running maxima and sums [64], and weighted sums of values [64, columns]."""
        by_row = plgpu.Layout.WGMMA.reduce(1)
        top = plgpu.layout_cast(jnp.full((_WARPGROUP_ROWS,), _FLOOR, jnp.float32), by_row)
        total = plgpu.layout_cast(jnp.zeros((_WARPGROUP_ROWS,), jnp.float32), by_row)
        return top, total, plgpu.layout_cast(jnp.zeros((_WARPGROUP_ROWS, num_columns), jnp.float32), plgpu.Layout.WGMMA)

    def _step(self, warpgroup: Any, group: Any, start: Any, page: Any, state: Any, *, masked: bool) -> Any:
        """Take in one page, for the columns of the values from `start` on."""
        before, total, acc = state
        slot = self._slot(page)
        plgpu.barrier_wait(self.k_ready.at[slot])
        scores = _product(self.q_smem.at[group], self.k_smem.at[slot], self.size)
        if self.call.softcap is None:
            scores = scores * (self.call.scale * _LOG2E)
        else:
            scores = jnp.tanh(scores * (self.call.scale / self.call.softcap)) * (self.call.softcap * _LOG2E)
        if masked:
            scores = jnp.where(self._visible(group, page), scores, _MASKED)
        top = jnp.maximum(before, scores.max(axis=1))
        shrink = jnp.exp2(before - top)
        weights = jnp.exp2(scores - lax.broadcast_in_dim(top, scores.shape, [0]))
        total = total * shrink + weights.sum(axis=1)
        operand = weights.astype(self.k_smem.dtype)
        if self.p_smem is not None:
            self.p_smem[warpgroup] = operand
            operand = self.p_smem.at[warpgroup]
        if self.v_smem is not None:
            plgpu.barrier_wait(self.v_ready.at[slot])
        acc = acc * lax.broadcast_in_dim(shrink, acc.shape, [0])
        values = self._values(slot, start, acc.shape[1])
        if self.p_smem is None:
            acc = pl.run_state(lambda sums: plgpu.wgmma(sums, operand, values))(plgpu.ACC.init(acc))
        else:  # interpreters start no accumulator from a value
            acc = acc + _product(operand, values, acc.shape[1])
        plgpu.barrier_arrive(self.consumed.at[slot])
        return top, total, acc

    def _values(self, slot: Any, start: Any, width: int) -> Any:
        """[S, width] of a page's values."""
        columns = pl.ds(start, width)
        if self.v_smem is None:
            return self.k_smem.at[slot, columns, :].transpose((1, 0))
        return self.v_smem.at[slot, :, columns]

    def _visible(self, group: Any, page: Any) -> jax.Array:
        """[64, S]: causal, within the window and the tile."""
        iota = functools.partial(plgpu.broadcasted_iota, jnp.int32, (_WARPGROUP_ROWS, self.size), layout=plgpu.Layout.WGMMA)
        query = self.position + lax.div(iota(0) + group * _WARPGROUP_ROWS, jnp.int32(self.call.group))
        key = iota(1) + page * self.size
        visible = (key <= query) & (key < self.high)
        return visible if self.call.window is None else visible & (key > query - self.call.window)


def _product(a: Any, b: Any, width: int) -> jax.Array:
    """[64, C] by [C, width] on the tensor cores, in float32."""

    def run(acc: Any) -> jax.Array:
        plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(run, plgpu.ACC((_WARPGROUP_ROWS, width), jnp.float32))
