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

from pallas_kernels.mosaic_gpu import product

# Columns of a sum that are in registers at once: all of one of 64 rows, and of 128 rows, beside scores, a few.
MOST_COLUMNS = 256
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
    """Of 64 or 128 rows. q [M, D] and `weights` [M, S] are in shared memory, `scores` [M, S] and `totals` in tensor memory. `totals` are
    equal parts of the columns of the sum, each of at most `MOST_COLUMNS`; `done`: a barrier that orders the tensor core.
    """

    def __init__(self, q: Any, weights: Any, scores: Any, totals: list[Any], done: Any) -> None:
        self._q, self._weights, self._scores, self._totals, self._done = q, weights, scores, totals, done
        self.layout = plgpu.Layout.WGMMA if q.shape[0] == 64 else plgpu.Layout.TCGEN05

    def start(self) -> Any:
        for total in self._totals:
            for _, part in _parts(total, _COLUMNS):
                plgpu.async_store_tmem(part, plgpu.layout_cast(jnp.zeros(part.shape, jnp.float32), self.layout))
        plgpu.commit_tmem()
        return ()

    def scores(self, k: Any) -> jax.Array:
        plgpu.tcgen05_mma(self._scores, self._q, k, self._done, accumulate=False)
        self._finish()
        return self._load(self._scores)

    def add(self, state: Any, shrink: jax.Array, weights: jax.Array, v: Any, wait: Callable[[], None]) -> Any:
        self._weights[...] = weights.astype(self._q.dtype)
        plgpu.commit_smem()
        width = self._totals[0].shape[1]
        for index, total in enumerate(self._totals):  # each is rescaled while the tensor core adds to the one before
            for _, part in _parts(total, _COLUMNS):
                values = self._load(part)
                plgpu.async_store_tmem(part, values * lax.broadcast_in_dim(shrink, values.shape, [0]))
            plgpu.commit_tmem()
            if index == 0:
                wait()
            plgpu.tcgen05_mma(total, self._weights, v.at[:, pl.ds(index * width, width)], accumulate=True)
        plgpu.tcgen05_commit_arrive(self._done)
        self._finish()
        return state

    def sums(self, state: Any) -> Iterator[tuple[Any, jax.Array]]:
        del state
        for index, total in enumerate(self._totals):
            for start, part in _parts(total, _STORED_COLUMNS):
                yield pl.ds(index * total.shape[1] + start, part.shape[1]), self._load(part)

    def _finish(self) -> None:
        """Wait for the product."""
        plgpu.barrier_wait(self._done)

    def _load(self, source: Any) -> jax.Array:
        """What is in tensor memory, which may be overwritten afterwards."""
        values = plgpu.async_load_tmem(source, layout=self.layout)
        plgpu.wait_load_tmem()
        return values


def _parts(total: Any, step: int) -> Iterator[tuple[int, Any]]:
    """Parts of a sum, each with its first column."""
    rows, width = total.shape
    if rows == 64:  # whose columns are folded over the lanes: no part of them can be taken
        yield 0, total
        return
    for start in range(0, width, step):
        yield start, total.at[:, pl.ds(start, min(step, width - start))]
