"""Measure what the device can do, so that benchmarks can print how much of it was reached.

Run as a program it prints JSON: the command line measures in a process of its own, which leaves the device before an engine starts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# Well beyond the last cache of today's processors and accelerators.
TRAFFIC_BYTES = 2**29
TRAFFIC_ROWS = 8192
# Accelerators need a larger product than processors to reach their rate.
MATMUL_SIZE = {"cpu": 2048}
MATMUL_SIZE_ELSEWHERE = 8192
REPEATS = 5
DTYPES = ("float32", "bfloat16", "float16")


def measure() -> dict[str, Any]:
    """What the first device can do, the best of a few runs each: memory reads (float32) in bytes/s, matrix products in FLOP/s by dtype."""
    device = jax.devices()[0]
    return {
        "platform": device.platform,
        "device_kind": device.device_kind,
        "num_devices": len(jax.devices()),
        "bytes_per_second": _bytes_per_second(),
        "flops_per_second": {dtype: _flops_per_second(device.platform, dtype) for dtype in DTYPES},
    }


def _bytes_per_second() -> float:
    """The better of two programs that only read, as weights stream through a decode step: rows summed, and rows times a vector."""
    numbers = jnp.ones((TRAFFIC_ROWS, TRAFFIC_BYTES // 4 // TRAFFIC_ROWS), jnp.float32)
    vector = jnp.ones(numbers.shape[1], jnp.float32)
    total = jax.jit(lambda x: jnp.sum(x, axis=1))
    product = jax.jit(lambda x, v: x @ v)
    return TRAFFIC_BYTES / min(_best_seconds(lambda: total(numbers)), _best_seconds(lambda: product(numbers, vector)))


def _flops_per_second(platform: str, dtype: str) -> float:
    size = MATMUL_SIZE.get(platform, MATMUL_SIZE_ELSEWHERE)
    left = jnp.full((size, size), 0.5, dtype)
    product = jax.jit(lambda a, b: a @ b)
    return 2 * size**3 / _best_seconds(lambda: product(left, left))


def _best_seconds(run: Callable[[], Any]) -> float:
    jax.block_until_ready(run())
    best = float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(run())
        best = min(best, time.perf_counter() - start)
    return best


if __name__ == "__main__":
    print(json.dumps(measure()))
