"""Grouped products for Hopper and Blackwell GPUs, in Mosaic GPU.

An item of work is a tile of rows, one of the groups that have rows in it (`visits.py`), and a tile of outputs; as many programs as the GPU
has multiprocessors take items in turn, so that no work and no wait is in proportion to the groups. One warpgroup fetches tiles of rows and
of the group's matrix by the tensor memory accelerator, as many ahead as shared memory holds, across items. Outputs are the tensor cores'
long side, so that few rows waste little, and a group's matrix is read once for each tile of its rows.

On Hopper two warpgroups hold the sums of 64 outputs each in registers. On Blackwell one asks for products, which are summed in one of two
parts of tensor memory, while the other stores those of the item before. A tile may begin with rows of the group before and end with
rows of the next one; only its group's are stored, a power of two at a time, because the sizes of transfers are static.
"""

from __future__ import annotations

import functools
import logging
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul import triton
from pallas_kernels.grouped_matmul.visits import plan_visits
from pallas_kernels.mosaic_gpu import shared_matrix

_OUTPUTS, _INPUTS = 128, 64  # of a tile
_ALIGNMENT = 8  # of a tile's first row: shared memory is tiled by as many
_SHARED_MEMORY = 223 * 1024  # of a block, beside barriers
_MULTIPROCESSORS = {False: 132, True: 148}  # of Hopper and Blackwell


def ragged_dot(x: jax.Array, matrices: jax.Array, counts: jax.Array, *, blackwell: bool = False, interpret: Any = None) -> jax.Array:
    """As `lax.ragged_dot`: x [N, M], rows of one group together, by matrices [G, M, F] for counts [G] of rows: [N, F] in x's dtype.

    Rows behind the last group's hold anything. What the kernel cannot run, `triton.py` does, said once in the log: dtypes of other than 16
    bits, inputs that are no multiple of 8, outputs that are none of 16, and less than 128 outputs.

    Args:
        blackwell: the GPU has tcgen05 and tensor memory; else it has wgmma.
        interpret: `InterpretGPUParams` to run without a GPU.
    """
    num_rows, num_in = x.shape
    num_groups, _, num_out = matrices.shape
    if x.dtype.name not in ("bfloat16", "float16") or matrices.dtype != x.dtype or num_in % 8 or num_out % 16 or num_out < _OUTPUTS:
        say_once(f"{x.dtype} rows with {num_out} outputs of {num_in} inputs in {matrices.dtype}")
        return triton.ragged_dot(x, matrices, counts)
    rows, stages = plan_tile(num_rows, num_groups)
    visits = plan_visits(counts, 2 * min(num_rows, num_groups) + pl.cdiv(num_rows, rows), rows, _ALIGNMENT)
    padded = jnp.pad(x, ((0, max(rows - num_rows, -num_rows % _ALIGNMENT)), (0, -num_in % _INPUTS)))
    return _run(visits, padded, matrices, rows, stages, blackwell, interpret)[:num_rows]


def plan_tile(num_rows: int, num_groups: int) -> tuple[int, int]:
    """Rows of a tile, which holds those of an average group wherever it begins, and how many tiles are in shared memory at once."""
    rows = min(max(16, pl.next_power_of_2(num_rows // num_groups + _ALIGNMENT)), 256)  # what products on Blackwell and Hopper take
    return rows, (_SHARED_MEMORY - 2 * rows * _OUTPUTS) // (2 * _INPUTS * (rows + _OUTPUTS))


@functools.cache
def say_once(what: str) -> None:
    logging.getLogger(__name__).warning("grouped products of %s run through Triton; 16 bits and multiples of 16 from 128 on do not", what)


def _run(visits: jax.Array, x: jax.Array, matrices: jax.Array, rows: int, stages: int, blackwell: bool, interpret: Any) -> jax.Array:
    num_out = matrices.shape[2]
    turns, columns = x.shape[1] // _INPUTS, pl.cdiv(num_out, _OUTPUTS)
    programs = min(_MULTIPROCESSORS[blackwell], visits.shape[1] * columns)
    parts, width = (1, _OUTPUTS) if blackwell else (2, _OUTPUTS // 2)  # of the outputs of a tile, for a warpgroup each

    def grouped_matmul(visits, num_visits, x, matrices, out, x_tiles, matrix_tiles, out_tiles, ready, consumed, sums, done, stored):
        program, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")
        part = 0 if blackwell else warpgroup

        def each_item(body):
            """body(the item's number in this program, its visit, its first output)."""

            def one(item, _):
                index = program + item * programs
                body(item, lax.div(index, columns), lax.rem(index, columns) * _OUTPUTS)

            lax.fori_loop(0, lax.div(num_visits[0] * columns - program + (programs - 1), programs), one, None)

        def fetch(item, visit, output):
            group, row = visits[0, visit], visits[1, visit]

            def one(turn, _):
                count, inputs = item * turns + turn, pl.ds(turn * _INPUTS, _INPUTS)
                slot = lax.rem(count, stages)
                pl.when(count >= stages)(lambda: plgpu.barrier_wait(consumed.at[slot]))
                plgpu.copy_gmem_to_smem(x.at[pl.ds(row, rows), inputs], x_tiles.at[slot], ready.at[slot])
                for i in range(parts):
                    matrix = matrices.at[group, inputs, pl.ds(output + i * width, width)]
                    plgpu.copy_gmem_to_smem(matrix, matrix_tiles.at[slot, i], ready.at[slot])

            lax.fori_loop(0, turns, one, None)

        def multiply(item, total):
            """Sums [outputs, rows] of an item; in tensor memory they are there later."""

            def one(turn, _):
                slot = lax.rem(item * turns + turn, stages)
                matrix, x = matrix_tiles.at[slot, part].transpose((1, 0)), x_tiles.at[slot].transpose((1, 0))
                plgpu.barrier_wait(ready.at[slot])
                if blackwell:
                    plgpu.tcgen05_mma(total, matrix, x, consumed.at[slot], accumulate=turn > 0)
                else:
                    plgpu.wgmma(total, matrix, x)
                    plgpu.wgmma_wait(0)  # the other warpgroup has products meanwhile
                    plgpu.barrier_arrive(consumed.at[slot])

            lax.fori_loop(0, turns, one, None)
            return None if blackwell else total[...]

        def hopper_item(item, visit, output):
            total = pl.run_scoped(functools.partial(multiply, item), plgpu.ACC((width, rows), jnp.float32))
            store(visit, output, [(0, total)])

        def half(item):
            """Which half of tensor memory is an item's, and its sums."""
            index = lax.rem(item, 2)
            return index, sums.at[:, pl.ds(index * rows, rows)]

        def blackwell_products(item, visit, output):
            index, total = half(item)
            pl.when(item >= 2)(lambda: plgpu.barrier_wait(stored.at[index]))
            multiply(item, total)
            plgpu.tcgen05_commit_arrive(done.at[index])

        def blackwell_store(item, visit, output):
            index, total = half(item)
            step = min(64, rows)  # whose sums are in registers at once

            def load():
                for row in range(0, rows, step):
                    loaded = plgpu.async_load_tmem(total.at[:, pl.ds(row, step)], layout=plgpu.Layout.TCGEN05)
                    plgpu.wait_load_tmem()
                    yield row, plgpu.layout_cast(loaded, plgpu.Layout.TCGEN05_TRANSPOSED)

            plgpu.barrier_wait(done.at[index])
            store(visit, output, load())
            plgpu.barrier_arrive(stored.at[index])

        def store(visit, output, pieces):
            """Write sums from their row on, as far as rows are the group's."""
            tile, columns = out_tiles.at[part], pl.ds(output + part * width, width)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for row, values in pieces:
                target = tile.at[pl.ds(row, values.shape[1])].transpose((1, 0))
                # Narrow columns cannot be written without conflicts of banks, for which the compiler wants to be asked.
                plgpu.store(target, values.astype(out.dtype), optimized=num_out % 64 == 0)  # type: ignore[attr-defined]
            plgpu.commit_smem()
            _, first, start, end = (visits[field, visit] for field in range(4))
            number = end - start
            for size in (rows >> i for i in range(rows.bit_length())):

                def write(start=start, size=size):
                    plgpu.copy_smem_to_gmem(tile.at[pl.ds(start - first, size)], out.at[pl.ds(start, size), columns])

                pl.when((number & size) != 0)(write)
                start = start + (number & size)

        pl.when(warpgroup == 2)(lambda: each_item(fetch))
        pl.when(warpgroup < parts)(lambda: each_item(blackwell_store if blackwell else hopper_item))
        if blackwell:
            pl.when(warpgroup == 1)(lambda: each_item(blackwell_products))
        plgpu.wait_smem_to_gmem(0)

    tiles = functools.partial(shared_matrix, x.dtype, swizzle=2 * math.gcd(num_out, 64))
    halves = plgpu.Barrier(num_barriers=2, orders_tensor_core=True) if blackwell else None
    return plgpu.kernel(
        grouped_matmul,
        out_type=jax.ShapeDtypeStruct((x.shape[0], num_out), x.dtype),
        scratch_types=[
            tiles((stages, rows, _INPUTS)),
            tiles((stages, parts, _INPUTS, width)),
            tiles((parts, rows, width), rows=1),
            plgpu.Barrier(num_barriers=stages, num_arrivals=1 + parts),
            plgpu.Barrier(num_barriers=stages, num_arrivals=parts, orders_tensor_core=blackwell),
            plgpu.TMEM((_OUTPUTS, 2 * rows), jnp.float32) if blackwell else None,
            *(halves, halves),
        ],
        grid=(programs,),
        grid_names=("program",),
        num_threads=3,
        # The other semantics choose the tiling of `out`'s tiles, by 8 rows, and stores begin and end anywhere.
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        thread_name="warpgroup",
        interpret=interpret,
    )(visits, jnp.sum(visits[2] < visits[3], keepdims=True, dtype=jnp.int32), x, matrices)
