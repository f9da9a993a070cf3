"""Block sizes of the TPU kernel from shapes and device, and the memory that they take.

The defaults follow from sizes alone: transfers long enough to hide latency, score tiles that fill the matrix unit, everything twice for
double buffering, within a share of the vector memory. `pallas_kernels/tuned.py` has the exceptions that were found by measuring.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pallas_kernels.devices import MIB, Device
from pallas_kernels.ragged_paged_attention.layout import LANES, SUBLANES, UnsupportedShapeError, padded_head_dim, tile_rows
from pallas_kernels.tuned import exception

_DECODE_FETCH_BYTES = 4 * MIB  # about 2.5 us of a v6e's bandwidth: the start of a transfer is small beside it
_PREFILL_FETCH_POSITIONS = 1024
_COMPUTE_POSITIONS = 512
_SCORE_ROWS = 512  # rows of a prefill score tile: query positions x heads of a group
_DECODE_ROWS, _DECODE_QUERY_BYTES = 32, 2 * MIB
# Score tiles and their exponentials, which the compiler keeps in vector memory.
_SCORE_COPIES = 6


@dataclass(frozen=True)
class Shape:
    """What block sizes depend on, per shard. word_heads: W of the cache layout; itemsize: bytes of a query element; latent: see
    `reference.py`; packing: positions that share a word.
    """

    num_tokens: int
    num_rows: int
    pages_per_row: int
    page_size: int
    num_heads: int
    num_kv_heads: int
    word_heads: int
    padded_dim: int
    itemsize: int
    latent: int | None = None
    packing: int = 1

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def padded_group(self) -> int:
        """Query heads of a KV head in a decode, padded to whole tiles of the query's dtype."""
        return _round_up(self.group, tile_rows(self.itemsize))

    @property
    def value_dim(self) -> int:
        """Padded dims of values and outputs."""
        return self.padded_dim if self.latent is None else padded_head_dim(self.latent)

    @property
    def word_bytes(self) -> int:
        return 4 if self.latent is None else self.itemsize

    @property
    def tile_rows(self) -> int:
        """Positions of a tile of the cache."""
        return tile_rows(self.word_bytes)

    @property
    def page_bytes(self) -> int:
        return self.word_heads * self.page_rows * self.padded_dim * self.word_bytes

    @property
    def page_rows(self) -> int:
        """Rows of words of a page and head."""
        return self.page_size // self.packing

    @property
    def key(self) -> str:
        """How the table of exceptions names the shape; tokens and rows do not matter to the choice."""
        kind = ("" if self.latent is None else f" latent{self.latent}") + ("" if self.packing == 1 else " kept in 1")
        return f"heads{self.num_heads}/{self.num_kv_heads} dim{self.padded_dim}{kind} page{self.page_size} bytes{self.itemsize}"


@dataclass(frozen=True)
class Blocks:
    """Sizes of the kernel's blocks.

    Attributes:
        decode_rows: rows whose queries and outputs are in vector memory at once.
        decode_pages: pages of one fetch of a decode; decode_compute_pages: those that one product covers.
        query_tile: tokens of a prefill tile, a power of two.
        prefill_pages, prefill_compute_pages: the same for prefill.
    """

    decode_rows: int
    decode_pages: int
    decode_compute_pages: int
    query_tile: int
    prefill_pages: int
    prefill_compute_pages: int

    def decode_vmem(self, shape: Shape) -> int:
        """Bytes of vector memory of a decode."""
        row = shape.num_kv_heads * shape.padded_group
        queries = 2 * self.decode_rows * row * (shape.padded_dim + shape.value_dim) * shape.itemsize
        new = 2 * self.decode_rows * _round_up(shape.word_heads, SUBLANES) * shape.padded_dim * 4
        state = 2 * row * LANES * 4 + row * shape.value_dim * 4
        positions = self.decode_compute_pages * shape.page_size
        temporaries = positions * shape.padded_dim * 16 + _SCORE_COPIES * shape.padded_group * positions * 4
        return 2 * self.decode_pages * shape.page_bytes + queries + new + state + temporaries

    def prefill_vmem(self, shape: Shape) -> int:
        """Bytes of vector memory of a prefill."""
        rows = shape.group * self.query_tile
        queries = 2 * shape.num_kv_heads * rows * (shape.padded_dim + shape.value_dim) * shape.itemsize
        state = shape.num_kv_heads * rows * (2 * LANES + shape.value_dim) * 4
        positions = self.prefill_compute_pages * shape.page_size
        temporaries = positions * shape.padded_dim * 16 + _SCORE_COPIES * rows * positions * 4
        return 2 * self.prefill_pages * shape.page_bytes + queries + state + temporaries

    def append_vmem(self, shape: Shape) -> int:
        """Bytes of vector memory of writing prompt tokens into their pages."""
        window = shape.word_heads * (shape.page_size + shape.tile_rows) * shape.padded_dim * shape.word_bytes
        return APPEND_DEPTH * (shape.page_bytes + window)

    def vmem(self, shape: Shape) -> int:
        """Bytes of the hungriest of the three."""
        if shape.num_tokens == shape.num_rows:
            return self.decode_vmem(shape)
        return max(self.decode_vmem(shape), self.prefill_vmem(shape), self.append_vmem(shape))


APPEND_DEPTH = 3  # pages in flight: one read, one merged, one written


def choose_blocks(shape: Shape, device: Device, *, exceptions: bool = True) -> Blocks:
    """Block sizes for a shape on a device; without exceptions what follows from sizes alone.

    Raises:
        UnsupportedShapeError: page tables that scalar memory cannot hold, or pages of which not even two fit.
    """
    check_smem(shape, device)
    tuned = exception("ragged_paged_attention", device.kind, shape.key) if exceptions else None
    blocks = Blocks(**tuned) if tuned else _default_blocks(shape)
    budget = device.vmem_bytes // 2
    while blocks.vmem(shape) > budget:
        smaller = _shrink(blocks, shape, budget)
        if smaller == blocks:
            raise UnsupportedShapeError(
                f"attention over pages of {shape.page_size} positions of {shape.num_kv_heads} KV heads ({shape.page_bytes / MIB:.1f} MiB)"
                f" needs"
                f" {blocks.vmem(shape) / MIB:.1f} MiB of the {budget / MIB:.0f} MiB of vector memory to plan with on {device.kind};"
                f" block_size={max(SUBLANES, shape.page_size // 2 // SUBLANES * SUBLANES)} or a larger tensor_parallel_size needs less"
            )
        blocks = smaller
    return blocks


def check_smem(shape: Shape, device: Device) -> None:
    """Refuse page tables that do not fit half of the scalar memory; the compiler and the work lists need the rest."""
    budget = device.smem_bytes // 2
    needed = shape.num_rows * shape.pages_per_row * 4
    if needed > budget:
        positions = shape.pages_per_row * shape.page_size
        fitting = budget // 4 // shape.num_rows
        raise UnsupportedShapeError(
            f"page tables of {shape.num_rows} rows of {shape.pages_per_row} pages take {needed // 1024} KiB, and scalar memory has room for"
            f" {budget // 1024} KiB of them; block_size={_round_up(-(-positions // max(fitting, 1)), LANES)},"
            f" max_num_seqs={budget // 4 // shape.pages_per_row} or max_model_len={fitting * shape.page_size} fits"
        )


def _default_blocks(shape: Shape) -> Blocks:
    def pages(positions: int) -> int:
        return max(1, min(positions // shape.page_size, shape.pages_per_row))

    compute = pages(_COMPUTE_POSITIONS)
    decode = max(1, min(_DECODE_FETCH_BYTES // shape.page_bytes, shape.pages_per_row))
    prefill = pages(_PREFILL_FETCH_POSITIONS)
    tile = 1 << max(4, (_SCORE_ROWS // shape.group).bit_length() - 1)
    tile = min(tile, max(16, 1 << (shape.num_tokens - 1).bit_length()))
    row_bytes = shape.num_kv_heads * shape.padded_group * shape.padded_dim * shape.itemsize
    return Blocks(
        decode_rows=max(1, min(_DECODE_ROWS, shape.num_rows, _DECODE_QUERY_BYTES // row_bytes)),
        decode_pages=_multiple(decode, compute),
        decode_compute_pages=min(compute, decode),
        query_tile=tile,
        prefill_pages=_multiple(prefill, compute),
        prefill_compute_pages=min(compute, prefill),
    )


def _shrink(blocks: Blocks, shape: Shape, budget: int) -> Blocks:
    """Halve what weighs most and costs least; the same blocks where nothing is left to halve."""
    if blocks.decode_vmem(shape) > budget:
        if blocks.decode_pages > 1:
            pages = blocks.decode_pages // 2
            return replace(blocks, decode_pages=pages, decode_compute_pages=_divisor(pages, blocks.decode_compute_pages))
        return replace(blocks, decode_rows=max(1, blocks.decode_rows // 2))
    if blocks.prefill_vmem(shape) > budget:
        if blocks.query_tile > 128 or (blocks.prefill_pages == 1 and blocks.query_tile > 16):
            return replace(blocks, query_tile=blocks.query_tile // 2)
        pages = max(1, blocks.prefill_pages // 2)
        return replace(blocks, prefill_pages=pages, prefill_compute_pages=_divisor(pages, blocks.prefill_compute_pages))
    return blocks


def _multiple(pages: int, unit: int) -> int:
    """`pages` rounded down to whole units, if there is one."""
    return pages if pages < unit else pages // unit * unit


def _divisor(pages: int, at_most: int) -> int:
    return next(d for d in range(min(pages, at_most), 0, -1) if pages % d == 0)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
