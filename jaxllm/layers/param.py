"""Parameters with their logical axes, and the axis names."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

Axis = Literal["vocab", "embed", "heads", "kv_heads", "mlp", "experts"]
Axes = tuple[Axis | None, ...]


def param(shape: tuple[int, ...], axes: Axes, dtype: DTypeLike) -> nnx.Param:
    """A parameter of zeros (layers are built abstractly; loading brings the values) that names its logical axes."""
    return nnx.Param(jnp.zeros(shape, dtype), axes=axes)
