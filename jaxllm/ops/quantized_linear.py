"""Products of activations with quantized weights: which formulation runs where. docs/kernels.md has the figures behind the choice."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

import jax

from jaxllm.ops.mosaic_gpu import reason_against
from pallas_kernels.devices import find_device, is_blackwell
from pallas_kernels.quantized_matmul import xla
from pallas_kernels.quantized_matmul.weight import QuantizedWeight
from pallas_kernels.ragged_paged_attention.layout import UnsupportedShapeError

# Of more rows a tuned product takes so long that the copy of the weight is small beside it.
_MOST_ROWS_ON_GPUS = 512

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class QuantizedProduct:
    """kernel: for weights with groups of inputs and up to max_rows rows; None: everything runs through XLA."""

    kernel: Callable[..., jax.Array] | None = None
    max_rows: float = math.inf

    def __call__(self, x: jax.Array, weight: QuantizedWeight, *, activations: str | None = None) -> jax.Array:
        """x [T, I] times weight [O, I] of one shard: [T, O]; activations: see `pallas_kernels/quantized_matmul/reference.py`."""
        if self.kernel is not None and weight.group < x.shape[1] and x.shape[0] <= self.max_rows:
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
    if platform == "gpu" and reason_against(device_kind) is None:
        from pallas_kernels.quantized_matmul import gpu

        return QuantizedProduct(functools.partial(gpu.matmul, blackwell=is_blackwell(device_kind)), _MOST_ROWS_ON_GPUS)
    return QuantizedProduct()


@functools.cache
def _say_once(reason: str) -> None:
    logger.warning("a quantized product runs through XLA: %s", reason)
