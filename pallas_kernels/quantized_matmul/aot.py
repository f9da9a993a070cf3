"""Compile products with quantized weights for a target ahead of time (see `pallas_kernels/aot.py`).

The request: target, num_in, num_out, rows, values (dtype of the weight), group (None: a scale for each output), zeros (bool), activations
(None: bfloat16), kernel (bool: ours, or plain XLA); or cases, a list of what differs between several products, which are answered as such.
The answer: seconds, temp_bytes, argument_bytes; accessed_bytes as the compiler counts them (plain XLA on TPUs only); and of the kernel
vmem_bytes and blocks on TPUs, smem_bytes on GPUs.
"""

from __future__ import annotations

import functools
import time
from dataclasses import asdict
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.aot import compile_for, serve, target_mesh, temp_bytes
from pallas_kernels.devices import is_blackwell, parse_target
from pallas_kernels.quantized_matmul import tpu, xla
from pallas_kernels.quantized_matmul.tuning import choose_blocks
from pallas_kernels.quantized_matmul.weight import QuantizedWeight


def compile_product(request: dict[str, Any]) -> dict[str, Any]:
    """Compile one product on the first chip of the target."""
    one = target_mesh(request["target"], num_devices=1)
    device = parse_target(request["target"]).device
    num_in, num_out, activations = request["num_in"], request["num_out"], request["activations"]

    def array(shape: tuple[int, ...], dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(one, PartitionSpec()))

    scales = array((num_in // (request["group"] or num_in), num_out), jnp.float32)
    weight = QuantizedWeight(array((num_out, num_in), request["values"]), scales, scales if request["zeros"] else None)
    x = array((request["rows"], num_in), jnp.bfloat16)
    planned: dict[str, Any] = {}
    call = functools.partial(xla.matmul, activations=activations)
    if request["kernel"] and device.platform == "gpu":
        from pallas_kernels.quantized_matmul import gpu

        blackwell = is_blackwell(device.kind)
        planned = {"smem_bytes": gpu.plan_product(x.shape[0], weight, blackwell=blackwell).shared_bytes}
        call = functools.partial(gpu.matmul, activations=activations, blackwell=blackwell)
    elif request["kernel"]:
        shape = tpu.shape_of(x, weight, activations)
        blocks = choose_blocks(shape, device)
        planned = {"vmem_bytes": blocks.vmem(shape), "blocks": asdict(blocks)}
        call = functools.partial(tpu.matmul, activations=activations, blocks=blocks)
    started = time.perf_counter()
    compiled = compile_for(jax.jit(call), one, x, weight)
    return {
        "seconds": round(time.perf_counter() - started, 2),
        "temp_bytes": temp_bytes(compiled),
        "argument_bytes": compiled.memory_analysis().argument_size_in_bytes,
        "accessed_bytes": (compiled.cost_analysis() or {}).get("bytes accessed"),
        **planned,
    }


def compile_products(request: dict[str, Any]) -> dict[str, Any]:
    """Compile one product, or all the cases."""
    if "cases" not in request:
        return compile_product(request)
    return {"cases": [compile_product(request | case) for case in request["cases"]]}


if __name__ == "__main__":
    serve(compile_products)
