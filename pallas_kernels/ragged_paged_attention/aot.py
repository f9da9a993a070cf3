"""Compile the TPU kernel for a target ahead of time (see `pallas_kernels/aot.py`).

The request: target, kv_heads, heads, head_dim, dtype, tokens, rows, page_size, pages_per_row, num_pages, and optionally
window, softcap, sinks.
The answer: seconds, temp_bytes, alias_bytes, argument_bytes, vmem_bytes (planned), blocks.
"""

from __future__ import annotations

import functools
import time
from dataclasses import asdict
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.aot import serve, target_mesh
from pallas_kernels.ragged_paged_attention import layout, tpu
from pallas_kernels.ragged_paged_attention.tuning import choose_blocks, find_device


def compile_kernel(request: dict[str, Any]) -> dict[str, Any]:
    """Compile one call on the first chip of the target."""
    mesh = target_mesh(request["target"])
    one = jax.sharding.Mesh(mesh.devices.reshape(-1)[:1], ("model",), axis_types=mesh.axis_types)
    device = find_device(one.devices.flat[0].device_kind)
    dtype = jnp.dtype(request["dtype"])
    tokens, rows = request["tokens"], request["rows"]

    def array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(one, PartitionSpec()))

    pages = layout.cache_shape(request["num_pages"], request["page_size"], request["kv_heads"], request["head_dim"], dtype)
    arguments = (
        array((tokens, request["heads"], request["head_dim"]), dtype),
        *[array((tokens, request["kv_heads"], request["head_dim"]), dtype)] * 2,
        array(pages.shape, pages.dtype),
        array((rows, request["pages_per_row"]), jnp.int32),
        array((rows + 1,), jnp.int32),
        array((rows,), jnp.int32),
        array((), jnp.int32),
    )
    shape = tpu.shape_of(arguments[0], arguments[1], arguments[3], arguments[4])
    blocks = choose_blocks(shape, device)
    sinks = array((request["heads"],), jnp.float32) if request.get("sinks") else None
    call = functools.partial(
        tpu.attend, scale=request["head_dim"] ** -0.5, window=request.get("window"), softcap=request.get("softcap"), blocks=blocks
    )
    step = jax.jit(lambda *arrays, sinks: call(*arrays, sinks=sinks), donate_argnums=3)
    started = time.perf_counter()
    with jax.sharding.use_abstract_mesh(one.abstract_mesh):
        compiled = step.trace(*arguments, sinks=sinks).lower(lowering_platforms=("tpu",)).compile()
    memory = compiled.memory_analysis()
    return {
        "seconds": round(time.perf_counter() - started, 2),
        "temp_bytes": memory.temp_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "cache_bytes": pages.size * pages.dtype.itemsize,
        "vmem_bytes": blocks.vmem(shape),
        "blocks": asdict(blocks),
    }


if __name__ == "__main__":
    serve(compile_kernel)
