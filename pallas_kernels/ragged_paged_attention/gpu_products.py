"""The two products of attention on a GPU's tensor cores, and where the weighted sum of values lies meanwhile.

`Wgmma` (Hopper) keeps it in registers, `TensorMemory` (Blackwell) in the memory that tcgen05 accumulates in, where the warpgroup rescales
it whenever it takes in a page. M: rows of a warpgroup.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

# Columns of a sum of 128 rows that are in registers at once, beside scores; of 64 rows all are.
_COLUMNS = 16
_STORED_COLUMNS = 64  # as shared memory is tiled


class Wgmma:
    """Of 64 rows. q [M, D] is in shared memory; so are `weights` [M, S] for interpreters, which take no operands from registers and start
    no accumulator from a value; else None.
    """

    layout = plgpu.Layout.WGMMA

    def __init__(self, q: Any, weights: Any, width: int) -> None:
        """width: columns of the values."""
        self._q, self._weights, self._width = q, weights, width

    def start(self) -> Any:
        """No values seen."""
        return plgpu.layout_cast(jnp.zeros((self._q.shape[0], self._width), jnp.float32), self.layout)

    def scores(self, k: Any) -> jax.Array:
        """Queries by keys [D, S] in shared memory: [M, S] float32."""
        return product(self._q, k)

    def add(self, state: Any, shrink: jax.Array, weights: jax.Array, v: Any, wait: Callable[[], None]) -> Any:
        """state * shrink [M] + weights [M, S] by values [S, D], which are in shared memory after wait()."""
        state = state * lax.broadcast_in_dim(shrink, state.shape, [0])
        weights = weights.astype(self._q.dtype)
        if self._weights is None:
            wait()
            return pl.run_state(lambda acc: plgpu.wgmma(acc, weights, v))(plgpu.ACC.init(state))
        self._weights[...] = weights
        wait()
        return state + product(self._weights, v)

    def sums(self, state: Any) -> Iterator[tuple[slice, jax.Array]]:
        """Columns and what was summed up in them [M, columns]."""
        yield slice(None), state


class TensorMemory:
    """Of 64 or 128 rows. q [M, D] and `weights` [M, S] are in shared memory, `scores` [M, S] and `total` [M, D] in tensor memory; `done`: a
    barrier that orders the tensor core.
    """

    def __init__(self, q: Any, weights: Any, scores: Any, total: Any, done: Any) -> None:
        self._q, self._weights, self._scores, self._total, self._done = q, weights, scores, total, done
        self.layout = plgpu.Layout.WGMMA if q.shape[0] == 64 else plgpu.Layout.TCGEN05

    def start(self) -> Any:
        for _, total in self._parts(_COLUMNS):
            plgpu.async_store_tmem(total, plgpu.layout_cast(jnp.zeros(total.shape, jnp.float32), self.layout))
        plgpu.commit_tmem()
        return ()

    def scores(self, k: Any) -> jax.Array:
        plgpu.tcgen05_mma(self._scores, self._q, k, self._done, accumulate=False)
        self._finish()
        return self._load(self._scores)

    def add(self, state: Any, shrink: jax.Array, weights: jax.Array, v: Any, wait: Callable[[], None]) -> Any:
        self._weights[...] = weights.astype(self._q.dtype)
        for _, total in self._parts(_COLUMNS):
            values = self._load(total)
            plgpu.async_store_tmem(total, values * lax.broadcast_in_dim(shrink, values.shape, [0]))
        plgpu.commit_tmem()
        plgpu.commit_smem()
        wait()
        plgpu.tcgen05_mma(self._total, self._weights, v, self._done, accumulate=True)
        self._finish()
        return state

    def sums(self, state: Any) -> Iterator[tuple[slice, jax.Array]]:
        del state
        for columns, total in self._parts(_STORED_COLUMNS):
            yield columns, self._load(total)

    def _parts(self, step: int) -> Iterator[tuple[Any, Any]]:
        rows, width = self._q.shape
        if rows == 64:  # whose columns are folded over the lanes: no part of them can be taken
            yield slice(None), self._total
            return
        for start in range(0, width, step):
            columns = pl.ds(start, min(step, width - start))
            yield columns, self._total.at[:, columns]

    def _finish(self) -> None:
        """Wait for the product."""
        plgpu.barrier_wait(self._done)

    def _load(self, source: Any) -> jax.Array:
        """What is in tensor memory, which may be overwritten afterwards."""
        values = plgpu.async_load_tmem(source, layout=self.layout)
        plgpu.wait_load_tmem()
        return values


def product(a: Any, b: Any) -> jax.Array:
    """[M, C] by [C, N] by wgmma, in float32."""

    def run(acc: Any) -> jax.Array:
        plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(run, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))
