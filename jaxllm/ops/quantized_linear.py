"""Products of activations with quantized weights: which formulation runs where. docs/kernels.md has the figures behind the choice."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

import jax

from pallas_kernels.devices import find_device
from pallas_kernels.quantized_matmul import xla
from pallas_kernels.quantized_matmul.weight import QuantizedWeight
from pallas_kernels.ragged_paged_attention.layout import UnsupportedShapeError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class QuantizedProduct:
    """kernel: for weights with groups of inputs; None: everything runs through XLA."""

    kernel: Callable[..., jax.Array] | None = None

    def __call__(self, x: jax.Array, weight: QuantizedWeight, *, activations: str | None = None) -> jax.Array:
        """x [T, I] times weight [O, I] of one shard: [T, O]; activations: see `pallas_kernels/quantized_matmul/reference.py`."""
        if self.kernel is not None and weight.group < x.shape[1]:
            try:
                return self.kernel(x, weight, activations=activations)
            except UnsupportedShapeError as error:
                _say_once(str(error))
        return xla.matmul(x, weight, activations=activations)


def choose_product(platform: str, device_kind: str = "") -> QuantizedProduct:
    """The product for devices of a platform that jax calls `device_kind`."""
    if platform == "tpu":
        from pallas_kernels.quantized_matmul import tpu

        return QuantizedProduct(functools.partial(tpu.matmul, device=find_device(device_kind)))
    return QuantizedProduct()


@functools.cache
def _say_once(reason: str) -> None:
    logger.warning("a quantized product runs through XLA: %s", reason)
