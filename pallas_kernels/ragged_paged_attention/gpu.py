"""Ragged paged attention for Hopper and Blackwell GPUs: a Mosaic GPU kernel, run over decodes and over tiles of prompt tokens.

A program takes one tile (some consecutive tokens of one row) and one KV head. One warpgroup fetches the pages that the tile may see, by the
tensor memory accelerator, a few pages ahead; the others hold 64 or 128 rows each (tokens x heads of the group) and run an online softmax on
the tensor cores (`gpu_products.py`), in base 2 (FlashAttention-3, arXiv 2407.08608). Decodes are cut over the pages as well where rows and
heads do not fill the GPU (Flash-Decoding), and merged by XLA, which also writes the step's keys and values into the pages: both are small
beside the rest.

A latent (`reference.py`) has one page for keys and values, and heads that do not fit 64 rows go to more programs. Its prompts, absorbed as
well, run by tiles of 64 rows. On Hopper its sums are too wide for the registers of one warpgroup: two share the rows, each with half of the
columns (as FlashMLA does); both compute the scores, which costs products, of which decodes have plenty to spare, but no exchange. On
Blackwell they fit: 64 rows are folded over the 128 lanes of tensor memory, of which 512 columns take half.

Pages are k [N, K, D, S] and v [N, K, S, D], the layout of plain XLA attention, so that shapes that this kernel refuses can go there. The
warpgroup that fetches pages of 8-bit elements also widens them. Masked positions have weight zero, but are multiplied: what lies in pages
must be finite. Dims are those of `reference.py`; G = H / K.
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

from pallas_kernels.mosaic_gpu import shared_matrix
from pallas_kernels.ragged_paged_attention.gpu_products import MOST_COLUMNS, TensorMemory, Wgmma
from pallas_kernels.ragged_paged_attention.layout import UnsupportedShapeError

_MASKED = -1e30
_FLOOR = -1e29  # running maxima start here, far above masked scores, whose weights then are zero
_LOG2E = math.log2(math.e)
_DECODE_ROWS = 64  # of a tile, of which those of one token's group of heads are used
_SHARED_MEMORY = 227 * 1024  # of a block; two blocks fit a multiprocessor with half of it each
_TENSOR_COLUMNS = 512  # of tensor memory
_RESERVED = 2816  # of a block, for barriers and what alignment takes
_MAX_STAGES = 6
_MULTIPROCESSORS = 132  # to choose how decodes are cut; any Hopper or Blackwell has about as many

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
    blackwell: bool = False,
    interpret: Any = None,
) -> tuple[jax.Array, Pages]:
    """As `reference.attend`, with pages (k, v), or (k, None) of a latent. T == R means a step of decodes only.

    Args:
        splits: parts that each decode is cut into; None chooses by the shape.
        blackwell: the GPU has tcgen05 and tensor memory; else it has wgmma.
        interpret: `InterpretGPUParams` to run without a GPU.

    Raises:
        UnsupportedShapeError: see `check_shape`.
    """
    num_tokens, num_heads, head_dim = q.shape
    check_shape(q.dtype, num_heads, k.shape[1], head_dim, cache[0].shape[3], latent, kept=k.dtype, blackwell=blackwell)
    num_kv = k.shape[1] if latent is None else -(-num_heads // _DECODE_ROWS)
    group = num_heads // num_kv
    cache = _write(k, v, cache, page_table, q_starts, kv_lens)
    call = _Call(group, scale, window, softcap, latent, blackwell, interpret)
    grouped = q.reshape(num_tokens, num_kv, group, head_dim)
    num_rows = page_table.shape[0]
    out = _decode(grouped[:num_rows], cache, page_table, kv_lens, num_decodes, sinks, splits, call)
    if num_tokens > num_rows:
        out = jnp.pad(out, ((0, num_tokens - num_rows), (0, 0), (0, 0), (0, 0)))
        prefilled = _prefill(grouped, cache, page_table, q_starts, kv_lens, num_decodes, sinks, call)
        out = jnp.where(jnp.arange(num_tokens)[:, None, None, None] < num_decodes, out, prefilled)
    return out.reshape(num_tokens, num_heads, -1), cache


def check_shape(
    dtype: Any,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    latent: int | None = None,
    *,
    kept: Any = None,
    blackwell: bool = False,
) -> None:
    """Refuse what the kernel cannot run; kept: the dtype of pages, if it is not that of queries.

    Raises:
        UnsupportedShapeError: the message says what would do.
    """
    dtype = jnp.dtype(dtype)
    kept = dtype if kept is None else jnp.dtype(kept)
    if dtype.name not in ("bfloat16", "float16"):
        raise UnsupportedShapeError(f"attention in {dtype.name} is not supported by the GPU kernel; bfloat16 and float16 are")
    if kept not in (dtype, jnp.float8_e4m3fn, jnp.int8):
        raise UnsupportedShapeError(f"pages of {kept.name} are not supported by the GPU kernel; {dtype.name}, float8_e4m3fn and int8 are")
    if latent is not None:
        unit = 32 if kept == dtype else 64
        if head_dim % unit or latent % 128 or not 128 <= latent <= 512:
            raise UnsupportedShapeError(
                f"a latent of {latent} in {kept.name} keys of {head_dim} is not supported by the GPU kernel;"
                f" 128, 256, 384, 512 in multiples of {unit} are"
            )
        num_kv_heads = -(-num_heads // _DECODE_ROWS)
        if num_heads % num_kv_heads:
            raise UnsupportedShapeError(
                f"{num_heads} heads of a latent are not supported by the GPU kernel; multiples of {num_kv_heads} are"
            )
    elif head_dim % (16 if head_dim <= 128 and kept == dtype else 64) or not 16 <= head_dim <= 256:
        raise UnsupportedShapeError(
            f"head_dim {head_dim} in {kept.name} is not supported by the GPU kernel;"
            f" 64, 128, 192 and 256 are, and of 16 bits multiples of 16 up to 128"
        )
    if page_size not in (64, 128, 256):
        raise UnsupportedShapeError(f"pages of {page_size} positions are not supported by the GPU kernel; block_size 64, 128 or 256 is")
    if num_heads // num_kv_heads > _DECODE_ROWS:
        raise UnsupportedShapeError(f"{num_heads // num_kv_heads} heads to a KV head are not supported by the GPU kernel; up to 64 are")
    if not plan_tile(head_dim, page_size, latent, decode=False, blackwell=blackwell, narrow=kept != dtype).fits:
        raise UnsupportedShapeError(
            f"two pages of {page_size} positions of head_dim {head_dim} do not fit shared memory; block_size={page_size // 2} would"
        )


@dataclass(frozen=True)
class Plan:
    """How a tile is worked on: `warpgroups` of `rows` rows each, with `stages` pages in shared memory at once, and before them
    `narrow_stages` of 8-bit elements. shared_bytes: of queries and pages.
    """

    warpgroups: int
    rows: int
    stages: int
    narrow_stages: int
    shared_bytes: int

    @property
    def fits(self) -> bool:
        """One page is fetched while another is computed with."""
        return (self.narrow_stages or self.stages) >= 2


def plan_tile(head_dim: int, page_size: int, latent: int | None = None, *, decode: bool, blackwell: bool, narrow: bool) -> Plan:
    """Decodes leave room for a second block, if they can, which computes while the first one starts or ends."""
    # Products of 64 rows have their columns in two halves of tensor memory.
    rows = 128 if blackwell and latent is None and (not decode or head_dim % 32) else _DECODE_ROWS
    page = (2 if latent is None else 1) * page_size * head_dim  # in bytes of 8 bits

    def plan(warpgroups: int, room: int) -> Plan:
        fixed = warpgroups * rows * (head_dim * 2 + 4 + (page_size * 2 if blackwell else 0))
        pages = max(0, room - _RESERVED - fixed) // page
        if narrow:
            wide = 2 if pages >= 6 else 1
            stages = max(1, min(_MAX_STAGES, pages - 2 * wide))
        else:
            wide, stages = min(_MAX_STAGES, pages // 2), 0
        return Plan(warpgroups, rows, wide, stages, fixed + (2 * wide + stages) * page)

    if decode or latent is not None:
        choices = [plan(1, _SHARED_MEMORY // 2), plan(1, _SHARED_MEMORY)]
    else:
        enough = not blackwell or 2 * (head_dim + page_size) <= _TENSOR_COLUMNS
        choices = [plan(warpgroups, _SHARED_MEMORY) for warpgroups in ((2, 1) if enough else (1,))]
    return next((choice for choice in choices if choice.fits), choices[-1])


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
    blackwell: bool
    interpret: Any

    @property
    def columns(self) -> int:
        """Warpgroups that share rows, each with its columns of the values."""
        return 1 if self.latent is None or self.blackwell else 2

    def plan(self, cache: Pages, dtype: Any, *, decode: bool) -> Plan:
        """For queries of `dtype`."""
        _, _, head_dim, page_size = cache[0].shape
        narrow = cache[0].dtype != dtype
        return plan_tile(head_dim, page_size, self.latent, decode=decode, blackwell=self.blackwell, narrow=narrow)


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
    out, lse = _run(padded[:, :, None], cache, page_table, tiles, call, call.plan(cache, q.dtype, decode=True), splits)
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
    plan = call.plan(cache, q.dtype, decode=False)
    rows = plan.warpgroups * plan.rows
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
    tiled = tiled.reshape(tile.shape[0], num_kv, plan.warpgroups, plan.rows, head_dim)
    out, lse = _run(tiled, cache, page_table, tiles, call, plan, 1)

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


def _run(
    q: jax.Array, cache: Pages, page_table: jax.Array, tiles: _Tiles, call: _Call, plan: Plan, splits: int
) -> tuple[jax.Array, jax.Array]:
    """Attend with q [tiles, K, W, M, D]: W times M rows, tokens x heads of the group in this order; `splits` programs share the pages of a
    tile.

    Returns:
        [splits, tiles, K, W, M, D (or latent)], each part normalised by itself (zeros where it saw nothing), and the logarithm to base 2 of
        its sum of weights [splits, tiles, K, W, M].
    """
    num_tiles, num_kv, groups, rows, head_dim = q.shape
    sources = [pages for pages in cache if pages is not None]
    size = sources[0].shape[3]
    computing = groups * call.columns

    def kernel(*arrays: Any, **scratch: Any) -> None:
        program = _Program(call, arrays, scratch, splits=splits, rows=rows)
        warpgroup = lax.axis_index("warpgroup")
        pl.when(warpgroup < computing)(lambda: program.compute(warpgroup, computing))
        pl.when(warpgroup == computing)(lambda: program.fetch(computing))

    halves = 2 if call.blackwell and plan.rows == _DECODE_ROWS else 1
    k_swizzle, v_swizzle = (plgpu.find_swizzle(width // halves * 16) for width in (size, head_dim))
    k_swizzle = min(k_swizzle, plgpu.find_swizzle(head_dim * 16))  # as that of the queries
    pages = [((head_dim, size), k_swizzle), ((size, head_dim), v_swizzle)][: len(sources)]
    scratch = {
        "q": shared_matrix(q.dtype, (groups, plan.rows, head_dim), k_swizzle),
        "pages": [shared_matrix(q.dtype, (plan.stages, *page), swizzle) for page, swizzle in pages],
        "ready": [plgpu.Barrier(num_barriers=plan.stages)] * len(pages),
        "consumed": plgpu.Barrier(num_barriers=plan.stages, num_arrivals=computing),
        "lse": plgpu.SMEM((groups, plan.rows), jnp.float32),
        "q_ready": plgpu.Barrier(num_barriers=groups),
        "q_done": plgpu.Barrier(num_barriers=groups, num_arrivals=call.columns),
    }
    if plan.narrow_stages:
        scratch["narrow"] = [shared_matrix(sources[0].dtype, (plan.narrow_stages, *page), 64) for page, _ in pages]
        scratch["arrived"] = [plgpu.Barrier(num_barriers=plan.narrow_stages)] * len(pages)
    if call.blackwell or call.interpret is not None:
        scratch["weights"] = shared_matrix(q.dtype, (computing, plan.rows, size), plgpu.find_swizzle(size * 16))
    if call.blackwell:
        scratch["scores"] = plgpu.TMEM((plan.rows, groups * size), jnp.float32)
        width = call.latent or head_dim
        part = width if width <= MOST_COLUMNS else math.gcd(width, MOST_COLUMNS)
        scratch["totals"] = [plgpu.TMEM((plan.rows, groups * part), jnp.float32)] * (width // part)
        scratch["done"] = plgpu.Barrier(num_barriers=groups, orders_tensor_core=True)
    return plgpu.kernel(
        kernel,
        out_type=[
            jax.ShapeDtypeStruct((splits, *q.shape[:-1], call.latent or head_dim), q.dtype),
            jax.ShapeDtypeStruct((splits, *q.shape[:-1]), jnp.float32),
        ],
        scratch_types=scratch,
        grid=(num_tiles, num_kv, splits),
        grid_names=("tile", "head", "split"),
        num_threads=computing + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),  # rows lie within warps
        interpret=call.interpret,
    )(page_table, tiles.packed(), q, *sources)


class _Program:
    """One program of the grid: its tile, and the two kinds of warpgroups that work on it. Lists are of keys and values, or of a latent."""

    def __init__(self, call: _Call, arrays: tuple[Any, ...], scratch: dict[str, Any], *, splits: int, rows: int) -> None:
        self.call, self.rows, self.scratch = call, rows, scratch
        self.table, tiles, self.q, *self.sources, self.out, self.lse = arrays
        self.queries, self.pages, self.ready, self.consumed = (scratch[name] for name in ("q", "pages", "ready", "consumed"))
        self.stages, _, self.size = self.pages[0].shape
        self.tile, self.head, self.split = (lax.axis_index(name) for name in ("tile", "head", "split"))
        self.row, self.position, low, self.high = (tiles[field, self.tile] for field in range(4))
        first = lax.div(low, jnp.int32(self.size))
        last = lax.div(self.high + (self.size - 1), jnp.int32(self.size))
        share = lax.div(last - first + (splits - 1), jnp.int32(splits))
        self.begin = jnp.minimum(first + self.split * share, last)  # pages of this program
        self.end = jnp.minimum(self.begin + share, last)

    def _slot(self, page: Any, stages: int) -> Any:
        return lax.rem(page - self.begin, jnp.int32(stages))

    def fetch(self, computing: int) -> None:
        """Bring the queries, and the pages, each as soon as its slot is free."""
        narrow = "narrow" in self.scratch
        if computing > 1:
            plgpu.set_max_registers(64 if narrow else 40, action="decrease")
        for i in range(self.queries.shape[0]):
            target = self.queries.at[i, pl.ds(0, self.rows)]
            plgpu.copy_gmem_to_smem(self.q.at[self.tile, self.head, i], target, self.scratch["q_ready"].at[i])
        if narrow:
            self._fetch_narrow(self.scratch["narrow"], self.scratch["arrived"])
            return

        def one(page: Any, _: None) -> None:
            self.wait_until_free(page)
            self._copy(page, self.pages, self.ready)

        lax.fori_loop(self.begin, self.end, one, None)

    def _copy(self, page: Any, targets: list[Any], arrived: list[Any]) -> None:
        slot, page_id = self._slot(page, targets[0].shape[0]), self.table[self.row, page]
        head = self.head if self.call.latent is None else 0
        for source, target, barrier in zip(self.sources, targets, arrived, strict=True):
            plgpu.copy_gmem_to_smem(source.at[page_id, head], target.at[slot], barrier.at[slot])

    def _fetch_narrow(self, narrow: list[Any], arrived: list[Any]) -> None:
        """Pages of 8-bit elements, widened on their way to those that compute."""
        stages = narrow[0].shape[0]

        def request(page: Any) -> None:
            pl.when(page < self.end)(lambda: self._copy(page, narrow, arrived))

        for ahead in range(stages):
            request(self.begin + ahead)

        def one(page: Any, _: None) -> None:
            slot, wide_slot = self._slot(page, stages), self._slot(page, self.stages)
            self.wait_until_free(page)
            for source, barrier, target, ready in zip(narrow, arrived, self.pages, self.ready, strict=True):
                plgpu.barrier_wait(barrier.at[slot])
                for part in _blocks(source.shape[1:]):
                    # There is no instruction from float8 to bfloat16.
                    target[(wide_slot, *part)] = source[(slot, *part)].astype(jnp.float32).astype(target.dtype)
                plgpu.commit_smem()
                plgpu.barrier_arrive(ready.at[wide_slot])
            request(page + stages)

        lax.fori_loop(self.begin, self.end, one, None)

    def wait_until_free(self, page: Any) -> None:
        """Wait until the page that had the slot before this one was consumed."""
        pl.when(page >= self.begin + self.stages)(lambda: plgpu.barrier_wait(self.consumed.at[self._slot(page, self.stages)]))

    def compute(self, warpgroup: Any, computing: int) -> None:
        """Attend with the query rows of a warpgroup, and write what came of the first `rows` in its columns."""
        if computing > 1:
            plgpu.set_max_registers(224 if "narrow" in self.scratch else 232, action="increase")
        group: Any = warpgroup
        column: Any = 0
        if self.call.columns > 1:
            group, column = (part(warpgroup, jnp.int32(self.call.columns)) for part in (lax.div, lax.rem))
        width = self.out.shape[-1] // self.call.columns
        own = pl.ds(column * width, width)
        plgpu.barrier_wait(self.scratch["q_ready"].at[group])

        products = self._products(warpgroup, group, computing, width)
        by_row = products.layout.reduce(1)
        start = (plgpu.layout_cast(jnp.full(self.queries.shape[1:2], value, jnp.float32), by_row) for value in (_FLOOR, 0.0))
        state = (*start, products.start())
        for first, last, masked in self._stretches():
            state = lax.fori_loop(first, last, functools.partial(self._step, products, group, own, masked=masked), state)
        top, total, values = state
        self.wait_for_queries(group)
        total = jnp.maximum(total, 1e-30)
        for columns, part in products.sums(values):
            value = part * lax.broadcast_in_dim(1 / total, part.shape, [0])
            self.queries.at[group, :, own][:, columns] = value.astype(self.queries.dtype)
        target = (self.split, self.tile, self.head, group)
        used, lse = pl.ds(0, self.rows), self.scratch["lse"]

        def write_lse() -> None:
            lse[group] = top + jnp.log(total) * _LOG2E
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(lse.at[group, used], self.lse.at[target])

        pl.when(column == 0)(write_lse)
        plgpu.commit_smem()
        together = self.rows if width == self.queries.shape[-1] else 8  # a copy is of whole rows, or within a row of tiles
        for row in range(0, self.rows, together):
            rows = pl.ds(row, together)
            plgpu.copy_smem_to_gmem(self.queries.at[group, rows, own], self.out.at[(*target, rows, own)])
        plgpu.wait_smem_to_gmem(0)

    def wait_for_queries(self, group: Any) -> None:
        """Wait until nobody reads the queries any more: outputs take their place."""
        plgpu.barrier_arrive(self.scratch["q_done"].at[group])
        plgpu.barrier_wait(self.scratch["q_done"].at[group])

    def _products(self, warpgroup: Any, group: Any, computing: int, width: int) -> Wgmma | TensorMemory:
        queries = self.queries.at[group]
        weights = self.scratch["weights"].at[warpgroup] if "weights" in self.scratch else None
        if not self.call.blackwell:
            return Wgmma(queries, weights, width)

        def own(memory: Any) -> Any:
            part = memory.shape[1] // computing
            return memory if computing == 1 else memory.at[:, pl.ds(warpgroup * part, part)]

        totals = [own(total) for total in self.scratch["totals"]]
        return TensorMemory(queries, weights, own(self.scratch["scores"]), totals, self.scratch["done"].at[warpgroup])

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

    def _step(self, products: Wgmma | TensorMemory, group: Any, own: Any, page: Any, state: Any, *, masked: bool) -> Any:
        """Take in one page, for `own` columns of the values."""
        before, total, values = state
        slot = self._slot(page, self.stages)
        plgpu.barrier_wait(self.ready[0].at[slot])
        scores = products.scores(self.pages[0].at[slot])
        if self.call.softcap is None:
            scores = scores * (self.call.scale * _LOG2E)
        else:
            scores = jnp.tanh(scores * (self.call.scale / self.call.softcap)) * (self.call.softcap * _LOG2E)
        if masked:
            scores = jnp.where(self._visible(products.layout, scores.shape, group, page), scores, _MASKED)
        top = jnp.maximum(before, scores.max(axis=1))
        shrink = jnp.exp2(before - top)
        weights = jnp.exp2(scores - lax.broadcast_in_dim(top, scores.shape, [0]))
        total = total * shrink + weights.sum(axis=1)
        values = products.add(values, shrink, weights, self._values(slot, own), lambda: self._wait_for_values(slot))
        plgpu.barrier_arrive(self.consumed.at[slot])
        return top, total, values

    def _values(self, slot: Any, own: Any) -> Any:
        """[S, columns] of a page."""
        if self.call.latent is not None:
            return self.pages[0].at[slot, own, :].transpose((1, 0))
        return self.pages[1].at[slot, :, own]

    def _wait_for_values(self, slot: Any) -> None:
        if self.call.latent is None:
            plgpu.barrier_wait(self.ready[1].at[slot])

    def _visible(self, layout: Any, shape: tuple[int, ...], group: Any, page: Any) -> jax.Array:
        """[M, S]: causal, within the window and the tile."""
        iota = functools.partial(plgpu.broadcasted_iota, jnp.int32, shape, layout=layout)
        query = self.position + lax.div(iota(0) + group * shape[0], jnp.int32(self.call.group))
        key = iota(1) + page * self.size
        visible = (key <= query) & (key < self.high)
        return visible if self.call.window is None else visible & (key > query - self.call.window)


def _blocks(shape: tuple[int, ...]) -> list[tuple[Any, Any]]:
    """Cut a matrix into blocks of 64 x 64, which few registers can hold."""
    return [(pl.ds(row, 64), pl.ds(column, 64)) for row in range(0, shape[0], 64) for column in range(0, shape[1], 64)]
