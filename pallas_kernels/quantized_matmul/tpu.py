"""Products with quantized weights for TPUs: a Mosaic kernel that widens weights in vector memory, so that HBM is read in few bits only.

The grid runs over blocks of rows, outputs and inputs, inputs innermost; Pallas fetches the next blocks meanwhile. While rows are few, the
products of each group are scaled: the weight is only converted, and zeros are subtracted as the sum of a row's inputs times them. With
many rows the products would cost more than the weight, which then is scaled first and multiplied once for all its groups.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.devices import Device
from pallas_kernels.quantized_matmul.tuning import Blocks, Shape, choose_blocks
from pallas_kernels.quantized_matmul.weight import QuantizedWeight, quantize_rows
from pallas_kernels.ragged_paged_attention.layout import LANES


def matmul(
    x: jax.Array,
    weight: QuantizedWeight,
    *,
    activations: str | None = None,
    device: Device | None = None,
    blocks: Blocks | None = None,
    interpret: Any = False,
) -> jax.Array:
    """As `reference.matmul`.

    Args:
        device: what to plan memory for; needed unless `blocks` are given.
        interpret: as of `pallas_call`.

    Raises:
        UnsupportedShapeError: see `choose_blocks`.
    """
    shape = shape_of(x, weight, activations)
    if blocks is None:
        if device is None:
            raise ValueError("give the device to plan for, or blocks")
        blocks = choose_blocks(shape, device)
    groups = blocks.inputs // shape.group
    tables = [t.astype(jnp.float32).reshape(-1, groups, shape.num_out) for t in (weight.scales, weight.zeros) if t is not None]
    x = jnp.pad(x, ((0, -shape.rows % blocks.rows), (0, 0)))
    table = pl.BlockSpec((None, groups, blocks.outputs), lambda m, n, k: (k, 0, n))
    vmem = blocks.vmem(shape)
    out = pl.pallas_call(
        _Kernel(shape, blocks, activations),
        grid=(x.shape[0] // blocks.rows, pl.cdiv(shape.num_out, blocks.outputs), shape.num_in // blocks.inputs),
        in_specs=[
            pl.BlockSpec((blocks.rows, blocks.inputs), lambda m, n, k: (m, k)),
            pl.BlockSpec((blocks.outputs, blocks.inputs), lambda m, n, k: (n, k)),
            *[table] * len(tables),
        ],
        out_specs=pl.BlockSpec((blocks.rows, blocks.outputs), lambda m, n, k: (m, n)),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], shape.num_out), x.dtype),
        scratch_shapes=[pltpu.VMEM((blocks.rows, blocks.outputs), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=vmem + vmem // 2 + 2**22
        ),
        name="quantized_matmul",
        interpret=interpret,
    )(x, weight.values, *tables)
    return out[: shape.rows]


def shape_of(x: Any, weight: QuantizedWeight, activations: str | None) -> Shape:
    """The shape that block sizes depend on, of arrays or abstract ones."""
    num_out, num_in = weight.values.shape
    bits = 4 if weight.values.dtype == jnp.int4 else 8
    return Shape(x.shape[0], num_in, num_out, weight.group, bits, 1 + (weight.zeros is not None), activations is not None)


class _Kernel:
    """The program of one block."""

    def __init__(self, shape: Shape, blocks: Blocks, activations: str | None):
        self.shape, self.blocks, self.activations = shape, blocks, activations

    def __call__(self, x, values, scales, *rest):
        (*zeros, out, total) = rest
        turn = pl.program_id(2)

        @pl.when(turn == 0)
        def _() -> None:
            total[...] = jnp.zeros(total.shape, total.dtype)

        add = self._scaled_products if self.shape.scales_products else self._scaled_weight
        total[...] = add(total[...], x, values, scales, *zeros)

        @pl.when(turn == pl.num_programs(2) - 1)
        def _() -> None:
            out[...] = total[...].astype(out.dtype)

    def _scaled_products(self, total, x, values, scales, zeros=None):
        width, rows = self.shape.width, self.blocks.rows
        parts = width // self.shape.group
        for start in range(0, self.blocks.inputs, width):
            part, narrow = x[:, start : start + width], values[:, start : start + width]
            if parts > 1:  # a copy for each group, zero outside of it
                owner = lax.broadcasted_iota(jnp.int32, part.shape, 1) // self.shape.group
                part = jnp.concatenate([jnp.where(owner == i, part, jnp.zeros_like(part)) for i in range(parts)])
            row_scales: Any = 1.0
            if self.activations is not None:
                part, row_scales = quantize_rows(part, self.activations)
            products = _dot(part, narrow) * row_scales
            sums = jnp.sum(part.astype(jnp.float32), axis=1, keepdims=True) * row_scales
            for i in range(parts):
                mine, group = slice(i * rows, (i + 1) * rows), pl.ds(start // self.shape.group + i, 1)
                offset = 0.0 if zeros is None else sums[mine] * zeros[group, :]
                total = total + (products[mine] - offset) * scales[group, :]
        return total

    def _scaled_weight(self, total, x, values, scales, zeros=None):
        wide = values[...].astype(jnp.float32)
        if zeros is not None:
            wide = wide - self._by_input(zeros)
        return total + _dot(x[...], (wide * self._by_input(scales)).astype(x.dtype))

    def _by_input(self, table):
        """[groups, outputs] of a block as [outputs, inputs]."""
        columns = table[...].T
        wide = (self.blocks.outputs, LANES)
        owner = lax.broadcasted_iota(jnp.int32, wide, 1) // self.shape.group
        tiles = []
        for start in range(0, self.blocks.inputs, LANES):
            first = start // self.shape.group
            tile = jnp.broadcast_to(columns[:, first : first + 1], wide)
            for i in range(1, LANES // self.shape.group):
                tile = jnp.where(owner == i, jnp.broadcast_to(columns[:, first + i : first + i + 1], wide), tile)
            tiles.append(tile)
        return jnp.concatenate(tiles, axis=1)


def _dot(x, values):
    """[rows, C] by [outputs, C], in float32; int8 by int8 is exact in int32."""
    whole = x.dtype == values.dtype == jnp.int8
    if x.dtype != values.dtype:
        values = values.astype(x.dtype)
    dtype = jnp.int32 if whole else jnp.float32
    return lax.dot_general(x, values, (((1,), (1,)), ((), ())), preferred_element_type=dtype).astype(jnp.float32)
