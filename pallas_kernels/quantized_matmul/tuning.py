"""Block sizes of the TPU kernel from shapes and device, and the vector memory that they take.

The defaults follow from sizes alone: blocks of weight long enough to hide latency, all rows at once while they are few, so that the
weight is read once. `configs/tuned_blocks.json` holds exceptions found by measuring (see `pallas_kernels/tuned.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pallas_kernels.devices import MIB, Device
from pallas_kernels.ragged_paged_attention.layout import LANES, UnsupportedShapeError
from pallas_kernels.tuned import exception

GROUPS = (32, 64, 128, 256)
_ROW_TILE = 16  # sublanes of a bfloat16 tile
_FEW_ROWS = 64  # up to here scaling products costs less than scaling weights
_MOST_ROWS = 1024
_MOST_INPUTS = 2048
_WEIGHT_BYTES = 2 * MIB


@dataclass(frozen=True)
class Shape:
    """What block sizes depend on, per shard. group: inputs that share a scale; bits of a weight; tables: scales, and zeros if there are."""

    rows: int
    num_in: int
    num_out: int
    group: int
    bits: int
    tables: int
    rounds: bool

    @property
    def scales_products(self) -> bool:
        """Whether products of a group are scaled, and not its weights: cheaper where rows are few, and the only way for rounded ones."""
        return self.rounds or self.rows <= _FEW_ROWS

    @property
    def width(self) -> int:
        """Inputs of one product that is scaled."""
        return max(self.group, LANES)

    @property
    def key(self) -> str:
        """How the table of exceptions names the shape: rows up to the next power of two."""
        rounded = " rounded" if self.rounds else ""
        return f"rows{1 << (self.rows - 1).bit_length()} in{self.num_in} out{self.num_out} group{self.group} bits{self.bits}{rounded}"


@dataclass(frozen=True)
class Blocks:
    """Rows, outputs and inputs of one block; inputs divide I, and are whole groups and whole tiles."""

    rows: int
    outputs: int
    inputs: int

    def vmem(self, shape: Shape) -> int:
        """Bytes of vector memory: blocks twice, sums, and what is computed between them."""
        x, weight, out = self.rows * self.inputs * 2, self.outputs * self.inputs * shape.bits // 8, self.rows * self.outputs
        tables = shape.tables * max(8, self.inputs // shape.group) * self.outputs * 4
        if shape.scales_products:
            between = self.outputs * shape.width * 4 + 2 * shape.width // shape.group * out * 4
        else:
            between = self.outputs * self.inputs * 12 + out * 4
        return 2 * (x + weight + out * 2 + tables) + out * 4 + between


def choose_blocks(shape: Shape, device: Device, *, exceptions: bool = True) -> Blocks:
    """Block sizes for a shape on a device; without exceptions what follows from sizes alone.

    Raises:
        UnsupportedShapeError: inputs or groups that are not whole tiles.
    """
    if shape.num_in % LANES or shape.group not in GROUPS:
        raise UnsupportedShapeError(
            f"a product with {shape.num_in} quantized inputs in groups of {shape.group} is not supported by the TPU kernel;"
            f" multiples of {LANES} inputs in groups of {', '.join(map(str, GROUPS))} are"
        )
    tuned = exception("quantized_matmul", device.kind, shape.key) if exceptions else None
    blocks = Blocks(**tuned) if tuned else _default_blocks(shape)
    while blocks.vmem(shape) > device.vmem_bytes // 2 and (smaller := _shrink(blocks, shape)) != blocks:
        blocks = smaller
    return blocks


def input_blocks(shape: Shape) -> list[int]:
    """Possible values of `Blocks.inputs`, small to large."""
    return [n for n in range(LANES, shape.num_in + 1, LANES) if shape.num_in % n == 0 and n % shape.group == 0]


def _default_blocks(shape: Shape) -> Blocks:
    inputs = [n for n in input_blocks(shape) if n <= _MOST_INPUTS][-1]
    outputs = _WEIGHT_BYTES * 8 // shape.bits // inputs if shape.rows <= _FEW_ROWS else 512
    return Blocks(
        rows=min(_up(shape.rows, _ROW_TILE), _MOST_ROWS),
        outputs=min(outputs // LANES * LANES, _up(shape.num_out, LANES)),
        inputs=inputs,
    )


def _shrink(blocks: Blocks, shape: Shape) -> Blocks:
    """Halve what costs least; the same blocks where nothing is left to halve."""
    if blocks.outputs > 2 * LANES:
        return replace(blocks, outputs=_up(blocks.outputs // 2, LANES))
    if blocks.rows > LANES:
        return replace(blocks, rows=_up(blocks.rows // 2, _ROW_TILE))
    smaller = [n for n in input_blocks(shape) if n < blocks.inputs]
    return replace(blocks, inputs=smaller[-1]) if smaller else replace(blocks, outputs=LANES, rows=_ROW_TILE)


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
