"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864), halves form, angles in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.specs import RopeSpec

# cosine and sine, each [T, rotated / 2] float32
Rotation = tuple[jax.Array, jax.Array]


def rotation(positions: jax.Array, spec: RopeSpec) -> Rotation:
    """Cosines and sines of the angles at positions [T]; the same for every layer that shares the spec."""
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(np.array(spec.frequencies, np.float32))
    return jnp.cos(angles) * spec.magnitude, jnp.sin(angles) * spec.magnitude


def rotate(x: jax.Array, rotation: Rotation) -> jax.Array:
    """Rotate x [T, ..., D] by its row's angles; dimensions past the rotated ones pass unchanged."""
    cos, sin = (part.reshape(part.shape[0], *(1,) * (x.ndim - 2), part.shape[1]) for part in rotation)
    half = cos.shape[-1]
    first = x[..., :half].astype(jnp.float32)
    second = x[..., half : 2 * half].astype(jnp.float32)
    parts = [(first * cos - second * sin).astype(x.dtype), (second * cos + first * sin).astype(x.dtype)]
    if x.shape[-1] > 2 * half:
        parts.append(x[..., 2 * half :])
    return jnp.concatenate(parts, axis=-1)
