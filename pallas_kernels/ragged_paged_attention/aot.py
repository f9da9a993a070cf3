"""Compile the attention kernels for a target ahead of time (see `pallas_kernels/aot.py`).

The request: target, kv_heads, heads, head_dim, dtype, tokens, rows, page_size, pages_per_row, num_pages, and optionally
window, softcap, sinks, latent, kv_dtype (of pages, if not dtype).
The answer: seconds, temp_bytes, alias_bytes, argument_bytes, cache_bytes; for TPUs vmem_bytes (planned) and blocks; for GPUs smem_bytes.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.aot import compile_for, serve, target_mesh
from pallas_kernels.devices import Device, is_blackwell, parse_target
from pallas_kernels.ragged_paged_attention import layout, tpu
from pallas_kernels.ragged_paged_attention.tuning import choose_blocks


def compile_kernel(request: dict[str, Any]) -> dict[str, Any]:
    """Compile one call on the first chip of the target."""
    one = target_mesh(request["target"], num_devices=1)
    device = parse_target(request["target"]).device
    dtype = jnp.dtype(request["dtype"])
    kept = jnp.dtype(request.get("kv_dtype", dtype))
    tokens, rows, heads, head_dim = (request[name] for name in ("tokens", "rows", "heads", "head_dim"))

    def array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(one, PartitionSpec()))

    cache = jax.tree.map(lambda leaf: array(leaf.shape, leaf.dtype), _cache_shapes(request, device, kept))
    latent, new = request.get("latent"), array((tokens, request["kv_heads"], head_dim), kept)
    arguments = (
        array((tokens, heads, head_dim), dtype),
        new,
        new if latent is None else None,
        cache,
        array((rows, request["pages_per_row"]), jnp.int32),
        array((rows + 1,), jnp.int32),
        array((rows,), jnp.int32),
        array((), jnp.int32),
    )
    attend, planned = _kernel(device, arguments, latent)
    options = {name: request.get(name) for name in ("window", "softcap", "latent")}
    call = functools.partial(attend, scale=head_dim**-0.5, **options)
    sinks = array((heads,), jnp.float32) if request.get("sinks") else None
    step = jax.jit(lambda *arrays, sinks: call(*arrays, sinks=sinks), donate_argnums=3)
    started = time.perf_counter()
    memory = compile_for(step, one, *arguments, sinks=sinks).memory_analysis()
    return {
        "seconds": round(time.perf_counter() - started, 2),
        "temp_bytes": memory.temp_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "cache_bytes": sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache)),
        **planned,
    }


def _cache_shapes(request: dict[str, Any], device: Device, dtype: jnp.dtype) -> Any:
    pages, size, heads, dim = (request[name] for name in ("num_pages", "page_size", "kv_heads", "head_dim"))
    latent = request.get("latent") is not None
    if device.platform == "tpu":
        return layout.cache_shape(pages, size, heads, dim, dtype, latent=latent)
    values = None if latent else jax.ShapeDtypeStruct((pages, heads, size, dim), dtype)
    return jax.ShapeDtypeStruct((pages, heads, dim, size), dtype), values


def _kernel(device: Device, arguments: tuple[Any, ...], latent: int | None) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The kernel for the device, and what was planned for it."""
    q, k, _, cache, table = arguments[:5]
    if device.platform == "gpu":
        from pallas_kernels.ragged_paged_attention import gpu

        blackwell = is_blackwell(device.kind)
        decode = q.shape[0] == table.shape[0]
        plan = gpu.plan_tile(q.shape[2], cache[0].shape[3], latent, decode=decode, blackwell=blackwell, narrow=k.dtype != q.dtype)
        return functools.partial(gpu.attend, blackwell=blackwell), {"smem_bytes": plan.shared_bytes}
    shape = tpu.shape_of(q, k, cache, table, latent)
    blocks = choose_blocks(shape, device)
    return functools.partial(tpu.attend, blocks=blocks), {"vmem_bytes": blocks.vmem(shape), "blocks": asdict(blocks)}


if __name__ == "__main__":
    serve(compile_kernel)
