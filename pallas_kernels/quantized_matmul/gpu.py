"""Products with groups of quantized inputs for Hopper and Blackwell GPUs: a Mosaic GPU kernel that widens weights in registers.

A program takes some outputs, a tile of rows and a share of the inputs. One warpgroup fetches, by the tensor memory accelerator, tiles of
rows, weights and scales a few ahead; the others hold 64 or 128 outputs each. Outputs are the tensor cores' long side, so that few rows
waste little: a warpgroup widens its weights to bfloat16, multiplies them by the rows (`gpu_products.py`), and scales the products of each
group. Where outputs and rows do not fill the GPU the inputs are split, and XLA adds the parts, which also subtracts zeros, as sums of the
inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu import shared_matrix
from pallas_kernels.quantized_matmul.gpu_products import TensorMemory, Wgmma
from pallas_kernels.quantized_matmul.weight import QuantizedWeight, round_rows
from pallas_kernels.ragged_paged_attention.layout import UnsupportedShapeError

_INPUTS = 128  # of a tile
_MOST_STAGES = 4
_MOST_ROWS = 128  # of a tile: sums and products of more do not fit the registers
_MULTIPROCESSORS = 132
_SHARED_MEMORY = 226 * 1024  # of a block, without barriers


def matmul(
    x: jax.Array, weight: QuantizedWeight, *, activations: str | None = None, blackwell: bool = False, interpret: Any = None
) -> jax.Array:
    """As `reference.matmul`, of bfloat16 numbers: rounded rows are multiplied in bfloat16.

    Args:
        blackwell: the GPU has tcgen05 and tensor memory; else it has wgmma.
        interpret: `InterpretGPUParams` to run without a GPU.

    Raises:
        UnsupportedShapeError: what are no whole tiles.
    """
    num_rows, num_in = x.shape
    num_out = weight.values.shape[0]
    outputs = (TensorMemory if blackwell else Wgmma).outputs
    if x.dtype != jnp.bfloat16 or num_in % _INPUTS or num_out % outputs or weight.group not in (32, 64, 128, 256):
        raise UnsupportedShapeError(
            f"a product of {x.dtype} rows with {num_out} outputs of {num_in} inputs in groups of {weight.group} is not supported by the GPU"
            f" kernel; bfloat16, multiples of {outputs} outputs and of {_INPUTS} inputs, and groups of 32, 64, 128 and 256 are"
        )
    if activations is not None:
        x = round_rows(x, activations, weight.group)
    plan = plan_product(num_rows, weight, blackwell=blackwell)
    padded = jnp.pad(x, ((0, -num_rows % plan.products.rows), (0, 0)))
    programs = num_out // plan.outputs * (padded.shape[0] // plan.products.rows)
    splits = max(1, min(_MULTIPROCESSORS // programs, num_in // _INPUTS // _MOST_STAGES))
    out = _run(padded, weight, plan, splits, interpret).sum(0)[:, :num_rows].T
    if weight.zeros is not None:
        sums = x.astype(jnp.float32).reshape(num_rows, -1, weight.group).sum(-1)
        out = out - jnp.dot(sums, weight.zeros * weight.scales, precision="highest")
    return out.astype(x.dtype)


@dataclass(frozen=True)
class Plan:
    """How a program multiplies its `outputs`, with `stages` tiles of `stage_bytes` in shared memory at once."""

    products: Wgmma | TensorMemory
    outputs: int
    stages: int
    stage_bytes: int

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: the tiles that are there at once."""
        return self.stages * self.stage_bytes


def plan_product(num_rows: int, weight: QuantizedWeight, *, blackwell: bool) -> Plan:
    """Two warpgroups compute where the outputs are enough for both."""
    kind = TensorMemory if blackwell else Wgmma
    warpgroups = 1 if weight.values.shape[0] % (2 * kind.outputs) else 2
    rows = min(_MOST_ROWS, max(kind.least_rows, 1 << (num_rows - 1).bit_length()))
    outputs, width = warpgroups * kind.outputs, min(weight.group, _INPUTS)
    weights = outputs * _INPUTS // (2 if weight.values.dtype == jnp.int4 else 1)
    stage = rows * _INPUTS * 2 + weights + outputs * (_INPUTS // width) * 4
    return Plan(kind(warpgroups, rows, _INPUTS, width), outputs, min(_MOST_STAGES, _SHARED_MEMORY // stage), stage)


def _run(x: jax.Array, weight: QuantizedWeight, plan: Plan, splits: int, interpret: Any) -> jax.Array:
    """[splits, O, rows] float32, the sums of each part of the inputs."""
    num_out, num_in = weight.values.shape
    made, stages, computing = plan.products, plan.stages, plan.products.warpgroups
    groups = _INPUTS // made.width
    turns = num_in // _INPUTS

    def kernel(x, values, scales, out, *, x_smem, values_smem, scales_smem, ready, consumed, **scratch):
        warpgroup = lax.axis_index("warpgroup")
        split = lax.axis_index("split")
        first, last = split * turns // splits, (split + 1) * turns // splits
        row, start = lax.axis_index("rows") * made.rows, lax.axis_index("outputs") * plan.outputs

        def fetch(turn, _):
            slot = lax.rem(turn - first, stages)
            pl.when(turn >= first + stages)(lambda: plgpu.barrier_wait(consumed.at[slot]))
            inputs, outputs = pl.ds(turn * _INPUTS, _INPUTS), pl.ds(start, plan.outputs)
            group = pl.ds(turn * _INPUTS // weight.group, groups)
            plgpu.copy_gmem_to_smem(x.at[pl.ds(row, made.rows), inputs], x_smem.at[slot], ready.at[slot])
            plgpu.copy_gmem_to_smem(values.at[outputs, inputs], values_smem.at[slot], ready.at[slot])
            plgpu.copy_gmem_to_smem(scales.at[group, outputs], scales_smem.at[slot], ready.at[slot])

        def compute(turn, totals):
            slot, totals = lax.rem(turn - first, stages), list(totals)
            plgpu.barrier_wait(ready.at[slot])
            mine = pl.ds(warpgroup * made.outputs, made.outputs)
            for i, part, products in made.products(values_smem.at[slot, mine], x_smem.at[slot], warpgroup, **scratch):
                scale = plgpu.layout_cast(scales_smem[slot, i, mine], made.layout.reduce(1))
                totals[part] = totals[part] + products * lax.broadcast_in_dim(scale, products.shape, [0])
            plgpu.commit_smem()  # what was read here may be fetched over, which goes another way through memory
            plgpu.barrier_arrive(consumed.at[slot])
            return tuple(totals)

        @pl.when(warpgroup == computing)
        def _():
            if computing > 1:
                plgpu.set_max_registers(40, action="decrease")
            lax.fori_loop(first, last, fetch, None)

        @pl.when(warpgroup < computing)
        def _():
            if computing > 1:
                plgpu.set_max_registers(232, action="increase")
            zero = plgpu.layout_cast(jnp.zeros((made.outputs, made.columns), jnp.float32), made.layout)
            totals = lax.fori_loop(first, last, compute, (zero,) * (made.rows // made.columns))
            for part, total in enumerate(totals):
                rows = pl.ds(row + part * made.columns, made.columns)
                out[split, pl.ds(start + warpgroup * made.outputs, made.outputs), rows] = total

    swizzle = min(128, 2 * made.width)
    bits = 4 if weight.values.dtype == jnp.int4 else 8
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((splits, num_out, x.shape[0]), jnp.float32),
        scratch_types={
            "x_smem": shared_matrix(x.dtype, (stages, made.rows, _INPUTS), swizzle),
            "values_smem": shared_matrix(weight.values.dtype, (stages, plan.outputs, _INPUTS), _INPUTS * bits // 8, columns=_INPUTS),
            "scales_smem": plgpu.SMEM((stages, groups, plan.outputs), jnp.float32),
            "ready": plgpu.Barrier(num_barriers=stages, num_arrivals=3),
            "consumed": plgpu.Barrier(num_barriers=stages, num_arrivals=computing),
            **made.scratch(interpret),
        },
        grid=(num_out // plan.outputs, x.shape[0] // made.rows, splits),
        grid_names=("outputs", "rows", "split"),
        num_threads=computing + 1,
        thread_name="warpgroup",
        interpret=interpret,
    )(x, weight.values, weight.scales.astype(jnp.float32))
