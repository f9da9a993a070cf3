"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864), angles in float32, and the temperature that grows with the position."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.specs import RopeSpec, TemperatureSpec

# cosine and sine, each [T, rotated / 2] float32
Rotation = tuple[jax.Array, jax.Array]


def rotation(positions: jax.Array, spec: RopeSpec) -> Rotation:
    """Cosines and sines of the angles at positions [T]; the same for every layer that shares the spec."""
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(np.array(spec.frequencies, np.float32))
    return jnp.cos(angles) * spec.magnitude, jnp.sin(angles) * spec.magnitude


def rotate(x: jax.Array, rotation: Rotation, *, interleaved: bool = False) -> jax.Array:
    """Rotate x [T, ..., D] by its row's angles; dimensions past the rotated ones pass unchanged.

    The two dimensions of an angle are half the rotated ones apart, or neighbours where `interleaved`.
    """
    cos, sin = (part.reshape(part.shape[0], *(1,) * (x.ndim - 2), part.shape[1]) for part in rotation)
    half = cos.shape[-1]
    split = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(0, half), slice(half, 2 * half))
    first, second = (x[..., part].astype(jnp.float32) for part in split)
    parts = [(first * cos - second * sin).astype(x.dtype), (second * cos + first * sin).astype(x.dtype)]
    if interleaved:
        parts = [jnp.stack(parts, axis=-1).reshape(*x.shape[:-1], 2 * half)]
    if x.shape[-1] > 2 * half:
        parts.append(x[..., 2 * half :])
    return jnp.concatenate(parts, axis=-1)


def temperature(positions: jax.Array, spec: TemperatureSpec) -> jax.Array:
    """Factors [T] of the queries at positions [T]."""
    return 1.0 + spec.beta * jnp.log1p(jnp.floor((positions.astype(jnp.float32) + spec.offset) / spec.period))
