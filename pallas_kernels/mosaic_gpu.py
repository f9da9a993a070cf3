"""What kernels for GPUs share: products on Hopper's tensor cores, and shared memory as tensor cores read it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


def product(a: Any, b: Any) -> jax.Array:
    """[M, C] by [C, N] by wgmma, in float32."""

    def run(acc: Any) -> jax.Array:
        plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(run, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


def shared_matrix(dtype: Any, shape: tuple[int, ...], swizzle: int, *, rows: int = 8, columns: int | None = None) -> Any:
    """Shared memory whose last two axes are tiled, by default as tensor cores read them; columns: of `swizzle` bytes, where jax's itemsize
    is not theirs.
    """
    # Newer versions of jax declare a method of these that type checkers take for abstract.
    tiling = plgpu.TilingTransform((rows, columns or swizzle // jnp.dtype(dtype).itemsize))  # type: ignore[abstract]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))  # type: ignore[abstract]
