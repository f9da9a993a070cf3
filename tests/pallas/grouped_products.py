"""Compile grouped products for a target ahead of time (see `pallas_kernels/aot.py`): `gpu.py` for GPUs, `lax.ragged_dot` for TPUs.

The request: target, rows, groups, num_in, num_out.
The answer: seconds, temp_bytes; accessed_bytes as the compiler counts them (TPUs only); tile_rows, stages and smem_bytes of the kernel.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.aot import compile_for, serve, target_mesh, temp_bytes
from pallas_kernels.devices import is_blackwell, parse_target


def compile_product(request: dict[str, Any]) -> dict[str, Any]:
    """Compile one product of bfloat16 on the first chip of the target."""
    one, device = target_mesh(request["target"], num_devices=1), parse_target(request["target"]).device
    rows, groups, num_in, num_out = (request[name] for name in ("rows", "groups", "num_in", "num_out"))
    everywhere = NamedSharding(one, PartitionSpec())
    x, matrices = (jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=everywhere) for shape in ((rows, num_in), (groups, num_in, num_out)))
    call: Any = jax.lax.ragged_dot
    planned = {}
    if device.platform == "gpu":
        from pallas_kernels.grouped_matmul import gpu

        call = functools.partial(gpu.ragged_dot, blackwell=is_blackwell(device.kind))
        tile, stages = gpu.plan_tile(rows, groups)
        planned = {"tile_rows": tile, "stages": stages, "smem_bytes": 2 * (stages * 64 * (tile + 128) + tile * 128)}
    started = time.perf_counter()
    compiled = compile_for(jax.jit(call), one, x, matrices, jax.ShapeDtypeStruct((groups,), jnp.int32, sharding=everywhere))
    seconds, accessed = round(time.perf_counter() - started, 2), (compiled.cost_analysis() or {}).get("bytes accessed")
    return {"seconds": seconds, "temp_bytes": temp_bytes(compiled), "accessed_bytes": accessed, **planned}


if __name__ == "__main__":
    serve(compile_product)
