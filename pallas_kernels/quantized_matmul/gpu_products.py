"""How a warpgroup of a GPU widens weights to bfloat16 and multiplies them by rows, group by group.

`Wgmma` (Hopper) multiplies what it has widened from its registers; `TensorMemory` (Blackwell) puts it into the memory that tcgen05 reads
weights from and leaves products in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu import product

# Columns of products that are in registers at once, beside sums and weights.
_COLUMNS = 32
# Columns of products in tensor memory, of a warpgroup.
_SUMS = 128


@dataclass(frozen=True)
class _Tile:
    """A warpgroup's weights [outputs, inputs] and rows [rows, inputs], both in shared memory.

    Attributes:
        warpgroups: that compute.
        rows, inputs: of a tile. width: inputs of one product.
    """

    warpgroups: int
    rows: int
    inputs: int
    width: int


class Wgmma(_Tile):
    """Interpreters take no operands from registers: for them weights go through shared memory."""

    outputs = 64
    least_rows = 8
    layout = plgpu.Layout.WGMMA

    @property
    def columns(self) -> int:
        """Of the parts that products are made in."""
        return self.rows

    def scratch(self, interpret: Any) -> dict[str, Any]:
        """The memory that `products` works in, by the name of its argument."""
        return {"wide": None if interpret is None else plgpu.SMEM((self.warpgroups, self.outputs, self.inputs), jnp.bfloat16)}

    def products(self, values: Any, x: Any, warpgroup: Any, **scratch: Any) -> Iterator[tuple[int, int, jax.Array]]:
        """Number of the product, number of the part, and the part [outputs, columns] float32."""
        pair = plgpu.Layout.WGMMA_UPCAST_2X
        weights = _widen(values, plgpu.Layout.WGMMA_UPCAST_4X if values.dtype == jnp.int4 else pair, pair, self.layout)
        for i in range(self.inputs // self.width):
            inputs = pl.ds(i * self.width, self.width)
            part = weights[:, i * self.width : (i + 1) * self.width]
            if scratch["wide"] is not None:
                scratch["wide"][warpgroup, :, inputs] = part
                part = scratch["wide"].at[warpgroup, :, inputs]
            yield i, 0, product(part, x.at[:, inputs].transpose((1, 0)))


class TensorMemory(_Tile):
    """As `Wgmma`. A thread widens the weights of one output. As many products as there is room for are made at once."""

    outputs = 128
    least_rows = 16  # the narrowest product of 128 outputs (PTX ISA, shapes of tcgen05.mma)
    layout = plgpu.Layout.TCGEN05

    @property
    def columns(self) -> int:
        return min(_COLUMNS, self.rows)

    def scratch(self, interpret: Any) -> dict[str, Any]:
        del interpret
        return {
            "wide": plgpu.TMEM((self.outputs, self.warpgroups * self.inputs), jnp.bfloat16, packed=True),
            "sums": plgpu.TMEM((self.outputs, self.warpgroups * self._together * self.rows), jnp.float32),
            "done": plgpu.Barrier(num_barriers=self.warpgroups, orders_tensor_core=True),
        }

    def products(self, values: Any, x: Any, warpgroup: Any, **scratch: Any) -> Iterator[tuple[int, int, jax.Array]]:
        native, done = plgpu.Layout.TCGEN05_TMEM_NATIVE, scratch["done"].at[warpgroup]
        wide, sums = (_share(scratch[name], warpgroup, self.warpgroups) for name in ("wide", "sums"))
        load = native(32 if values.dtype == jnp.int4 else 16)  # 16 bytes
        plgpu.async_store_tmem(wide, _widen(values, load, native(8), native(2)))
        plgpu.commit_tmem()
        for first in range(0, self.inputs // self.width, self._together):
            for i in range(self._together):
                inputs = pl.ds((first + i) * self.width, self.width)
                own, rows = sums.at[:, pl.ds(i * self.rows, self.rows)], x.at[:, inputs].transpose((1, 0))
                plgpu.tcgen05_mma(own, wide.at[:, inputs], rows, accumulate=False)
            plgpu.tcgen05_commit_arrive(done)
            plgpu.barrier_wait(done)
            for start in range(0, self._together * self.rows, self.columns):
                part = plgpu.async_load_tmem(sums.at[:, pl.ds(start, self.columns)], layout=self.layout)
                plgpu.wait_load_tmem()
                yield first + start // self.rows, start % self.rows // self.columns, part

    @property
    def _together(self) -> int:
        return min(self.inputs // self.width, _SUMS // self.rows)


def _share(memory: Any, warpgroup: Any, warpgroups: int) -> Any:
    columns = memory.shape[1] // warpgroups
    return memory.at[:, pl.ds(warpgroup * columns, columns)]


def _widen(values: Any, loaded: Any, converted: Any, final: Any) -> jax.Array:
    """Weights from shared memory as bfloat16, in the layouts that they are loaded, converted and used in."""
    narrow = plgpu.layout_cast(values[...], loaded)
    if values.dtype == jnp.float8_e4m3fn:
        narrow = narrow.astype(jnp.float16)
    return plgpu.layout_cast(plgpu.layout_cast(narrow, converted).astype(jnp.bfloat16), final)
