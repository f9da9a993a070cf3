"""Keys and values of 8 bits: pages hold elements in units of a static scale of each KV head.

Scores are linear in the keys and outputs in the values. So a scale of keys goes to the queries, one of values to the outputs, and every
`attend` (reference, kernels, XLA) reads pages of 8 bits as if their elements were the keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def quantize(x: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    """x [T, K, D] in units of scale [K], rounded to `dtype` (float8_e4m3fn or int8) [T, K, D]; what is out of its range is clipped."""
    limits: Any = jnp.finfo(dtype) if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype)
    units = jnp.clip(x.astype(jnp.float32) / scale[:, None], float(limits.min), float(limits.max))
    if limits.dtype == jnp.int8:
        units = jnp.round(jnp.where(jnp.isfinite(units), units, 0))
    return units.astype(dtype)


def attend_scaled(
    attend: Callable[..., tuple[jax.Array, Any]],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    cache: Any,
    *arrays: Any,
    dtype: Any,
    k_scale: jax.Array,
    v_scale: jax.Array,
    **options: Any,
) -> tuple[jax.Array, Any]:
    """`attend` over pages of `dtype`, with q [T, H, D], k and v [T, K, D] of any float dtype and k_scale, v_scale [K] float32: the same for
    a latent, which has no v.
    """
    group = q.shape[1] // k.shape[1]
    scaled = (q * jnp.repeat(k_scale, group)[:, None]).astype(q.dtype)
    values = None if v is None else quantize(v, v_scale, dtype)
    out, cache = attend(scaled, quantize(k, k_scale, dtype), values, cache, *arrays, **options)
    return (out * jnp.repeat(v_scale, group)[:, None]).astype(out.dtype), cache
