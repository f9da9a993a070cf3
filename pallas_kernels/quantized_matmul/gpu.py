"""Products with groups of quantized inputs for Hopper GPUs: a Mosaic GPU kernel that widens weights in registers.

A program takes 128 outputs, a tile of rows and a share of the inputs. One warpgroup fetches, by the tensor memory accelerator, tiles of
rows, weights and scales a few ahead; two others hold 64 outputs each. Outputs are the tensor cores' long side, so that few rows waste
little: a warpgroup converts its weights to bfloat16 in registers, multiplies them by the rows, and scales the products of each group.
Where outputs and rows do not fill the GPU the inputs are split, and XLA adds the parts, which also subtracts zeros, as sums of the inputs.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.quantized_matmul.weight import QuantizedWeight, round_rows
from pallas_kernels.ragged_paged_attention.gpu_products import product
from pallas_kernels.ragged_paged_attention.layout import UnsupportedShapeError

_OUTPUTS = 64  # of a warpgroup
_WARPGROUPS = 2
_INPUTS = 128  # of a tile
_STAGES = 4
_MOST_ROWS = 128  # of a tile: sums and products of more do not fit the registers
_MULTIPROCESSORS = 132


def matmul(x: jax.Array, weight: QuantizedWeight, *, activations: str | None = None, interpret: Any = None) -> jax.Array:
    """As `reference.matmul`, of bfloat16 numbers: rounded rows are multiplied in bfloat16.

    Raises:
        UnsupportedShapeError: what are no whole tiles.
    """
    num_rows, num_in = x.shape
    num_out = weight.values.shape[0]
    if x.dtype != jnp.bfloat16 or num_in % _INPUTS or num_out % (_OUTPUTS * _WARPGROUPS) or weight.group not in (32, 64, 128, 256):
        raise UnsupportedShapeError(
            f"a product of {x.dtype} rows with {num_out} outputs of {num_in} inputs in groups of {weight.group} is not supported by the GPU"
            f" kernel; bfloat16, multiples of {_OUTPUTS * _WARPGROUPS} of both, and groups of 32, 64, 128 and 256 are"
        )
    if activations is not None:
        x = round_rows(x, activations, weight.group)
    tile = _row_tile(num_rows)
    padded = jnp.pad(x, ((0, -num_rows % tile), (0, 0)))
    programs = num_out // (_OUTPUTS * _WARPGROUPS) * (padded.shape[0] // tile)
    splits = max(1, min(_MULTIPROCESSORS // programs, num_in // _INPUTS // _STAGES))
    out = _run(padded, weight, tile, splits, interpret).sum(0)[:, :num_rows].T
    if weight.zeros is not None:
        sums = x.astype(jnp.float32).reshape(num_rows, -1, weight.group).sum(-1)
        out = out - jnp.dot(sums, weight.zeros * weight.scales, precision="highest")
    return out.astype(x.dtype)


def shared_bytes(num_rows: int, weight: QuantizedWeight) -> int:
    """Shared memory of a block: the tiles that are there at once."""
    weights = _OUTPUTS * _WARPGROUPS * _INPUTS // (2 if weight.values.dtype == jnp.int4 else 1)
    scales = _OUTPUTS * _WARPGROUPS * max(1, _INPUTS // weight.group) * 4
    return _STAGES * (_row_tile(num_rows) * _INPUTS * 2 + weights + scales)


def _row_tile(num_rows: int) -> int:
    return min(_MOST_ROWS, max(8, 1 << (num_rows - 1).bit_length()))


def _run(x: jax.Array, weight: QuantizedWeight, tile: int, splits: int, interpret: Any) -> jax.Array:
    """[splits, O, rows] float32, the sums of each part of the inputs."""
    num_out, num_in = weight.values.shape
    width = min(weight.group, _INPUTS)
    groups = _INPUTS // width
    bits = 4 if weight.values.dtype == jnp.int4 else 8
    upcast = plgpu.Layout.WGMMA_UPCAST_4X if bits == 4 else plgpu.Layout.WGMMA_UPCAST_2X
    turns = num_in // _INPUTS

    def kernel(x, values, scales, out, x_smem, values_smem, scales_smem, wide_smem, ready, consumed):
        warpgroup = lax.axis_index("warpgroup")
        split = lax.axis_index("split")
        first, last = split * turns // splits, (split + 1) * turns // splits
        rows = pl.ds(lax.axis_index("rows") * tile, tile)
        start = lax.axis_index("outputs") * _OUTPUTS * _WARPGROUPS
        outputs = pl.ds(start, _OUTPUTS * _WARPGROUPS)

        def fetch(turn, _):
            slot = lax.rem(turn - first, _STAGES)
            pl.when(turn >= first + _STAGES)(lambda: plgpu.barrier_wait(consumed.at[slot]))
            inputs = pl.ds(turn * _INPUTS, _INPUTS)
            group = pl.ds(turn * _INPUTS // weight.group, groups)
            plgpu.copy_gmem_to_smem(x.at[rows, inputs], x_smem.at[slot], ready.at[slot])
            plgpu.copy_gmem_to_smem(values.at[outputs, inputs], values_smem.at[slot], ready.at[slot])
            plgpu.copy_gmem_to_smem(scales.at[group, outputs], scales_smem.at[slot], ready.at[slot])

        def compute(turn, total):
            slot = lax.rem(turn - first, _STAGES)
            plgpu.barrier_wait(ready.at[slot])
            mine = pl.ds(warpgroup * _OUTPUTS, _OUTPUTS)
            narrow = plgpu.layout_cast(values_smem[slot, mine], upcast)
            if values.dtype == jnp.float8_e4m3fn:
                narrow = narrow.astype(jnp.float16)
            if bits == 4:
                narrow = plgpu.layout_cast(narrow, plgpu.Layout.WGMMA_UPCAST_2X)
            wide = plgpu.layout_cast(narrow.astype(jnp.bfloat16), plgpu.Layout.WGMMA)
            for i in range(groups):
                part = wide[:, i * width : (i + 1) * width]
                if wide_smem is not None:
                    wide_smem[warpgroup, :, i * width : (i + 1) * width] = part
                    part = wide_smem.at[warpgroup, :, pl.ds(i * width, width)]
                scale = plgpu.layout_cast(scales_smem[slot, i, mine], plgpu.Layout.WGMMA.reduce(1))
                products = product(part, x_smem.at[slot, :, pl.ds(i * width, width)].transpose((1, 0)))
                total = total + products * lax.broadcast_in_dim(scale, total.shape, [0])
            plgpu.commit_smem()  # what was read here may be fetched over, which goes another way through memory
            plgpu.barrier_arrive(consumed.at[slot])
            return total

        @pl.when(warpgroup == _WARPGROUPS)
        def _():
            plgpu.set_max_registers(40, action="decrease")
            lax.fori_loop(first, last, fetch, None)

        @pl.when(warpgroup < _WARPGROUPS)
        def _():
            plgpu.set_max_registers(232, action="increase")
            zero = plgpu.layout_cast(jnp.zeros((_OUTPUTS, tile), jnp.float32), plgpu.Layout.WGMMA)
            total = lax.fori_loop(first, last, compute, zero)
            out[split, pl.ds(start + warpgroup * _OUTPUTS, _OUTPUTS), rows] = total

    swizzle = min(128, 2 * width)
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((splits, num_out, x.shape[0]), jnp.float32),
        scratch_types=[
            _tiled((_STAGES, tile, _INPUTS), x.dtype, swizzle, swizzle // 2),
            _tiled((_STAGES, _OUTPUTS * _WARPGROUPS, _INPUTS), weight.values.dtype, _INPUTS * bits // 8, _INPUTS),
            plgpu.SMEM((_STAGES, groups, _OUTPUTS * _WARPGROUPS), jnp.float32),
            # Interpreters take the operands of products from memory only.
            None if interpret is None else plgpu.SMEM((_WARPGROUPS, _OUTPUTS, _INPUTS), x.dtype),
            plgpu.Barrier(num_barriers=_STAGES, num_arrivals=3),
            plgpu.Barrier(num_barriers=_STAGES, num_arrivals=_WARPGROUPS),
        ],
        grid=(num_out // (_OUTPUTS * _WARPGROUPS), x.shape[0] // tile, splits),
        grid_names=("outputs", "rows", "split"),
        num_threads=_WARPGROUPS + 1,
        thread_name="warpgroup",
        interpret=interpret,
    )(x, weight.values, weight.scales.astype(jnp.float32))


def _tiled(shape: tuple[int, ...], dtype: Any, swizzle: int, columns: int) -> Any:
    # Newer versions of jax declare a method of these that type checkers take for abstract.
    tiling = plgpu.TilingTransform((8, columns))  # type: ignore[abstract]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))  # type: ignore[abstract]
