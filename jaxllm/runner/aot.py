"""Compile the whole step for accelerators that are not there, in a process of its own (see `pallas_kernels/aot.py`).

The request: target ("v6e:2x2", "h100:4"), hf_config, dtype, num_tokens and num_rows (of the bucket), page_size, max_model_len, num_pages
(of each cache group, or one number for all), and optionally tensor_parallel_size (None: every device of the target), max_num_seqs (None:
num_rows), num_layers (only so many first layers; None: all) and program: "step" (None), "encoder" (of a model that has one before its
decoder), or "pooling" (of a model to be pooled: nothing of the request is about pages, and token_ids are those of its classifier).
The answer, per device in bytes: argument_bytes, temp_bytes, alias_bytes, cache_bytes (page pools); seconds; kernels; num_layers; and
collectives, what the devices tell each other: see `Collectives`.
"""

from __future__ import annotations

import functools
import math
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.models.build import ModelDef, define_model
from jaxllm.models.pooling import define_pooling
from jaxllm.ops.attention import choose_backend
from jaxllm.runner.batch import BatchLayout
from jaxllm.runner.buckets import Bucket
from jaxllm.runner.memory import Limits, abstract_caches, cache_groups, cache_spec, state_interval
from jaxllm.runner.mesh import MESH_AXES, Placement
from jaxllm.runner.pooling import PoolingProgram, packed_size
from jaxllm.runner.sampler import SlotState
from jaxllm.runner.step import StepProgram, StepState, attend_groups
from jaxllm.sampling_params import MAX_LOGIT_BIAS_ENTRIES
from pallas_kernels.aot import compile_for, serve, target_mesh, temp_bytes


@dataclass(frozen=True)
class _Program:
    """What is compiled: a `function` of the parameters, what it changes in place (`state`), and an int32 array of `size`."""

    model_def: ModelDef
    function: Callable[..., Any]
    size: int
    caches: tuple[Any, ...] = ()
    state: tuple[Any, ...] = ()
    out_shardings: Any = None


def compile_step(request: dict[str, Any]) -> dict[str, Any]:
    """Compile one bucket of a model for a target."""
    placement = Placement(target_mesh(request["target"], MESH_AXES, request.get("tensor_parallel_size")))
    bucket = Bucket(request["num_tokens"], request["num_rows"])
    program = (_pooling if request.get("program") == "pooling" else _generating)(request, placement, bucket)
    model_def = program.model_def
    params = [_placed(model_def.shapes[name], placement.sharding(model_def.axes[name])) for name in model_def.names]
    packed = _placed(jax.ShapeDtypeStruct((program.size,), jnp.int32), placement.sharding())
    step = jax.jit(program.function, donate_argnums=(1,) if program.state else (), out_shardings=program.out_shardings)
    started = time.perf_counter()
    compiled = compile_for(step, placement.mesh, params, *program.state, packed)
    seconds = time.perf_counter() - started
    memory, text = compiled.memory_analysis(), compiled.as_text()
    pools = jax.tree.leaves(program.caches)
    return {
        "seconds": round(seconds, 2),
        "argument_bytes": memory.argument_size_in_bytes,
        "temp_bytes": temp_bytes(compiled),
        "alias_bytes": memory.alias_size_in_bytes,
        "cache_bytes": sum(math.prod(pages.sharding.shard_shape(pages.shape)) * pages.dtype.itemsize for pages in pools),
        "kernels": len(_KERNEL.findall(text)),
        "num_layers": len(model_def.cache_layers),
        "collectives": [asdict(found) for found in collectives(text)],
    }


def _generating(request: dict[str, Any], placement: Placement, bucket: Bucket) -> _Program:
    """A step of a generating model, or its encoder."""
    device = placement.mesh.devices.flat[0]
    backend = choose_backend(device.platform, device.device_kind)
    model_def = define_model(
        request["hf_config"],
        dtype=request["dtype"],
        tensor_parallel_size=placement.num_shards,
        max_model_len=request["max_model_len"],
        num_layers=request.get("num_layers"),
    )
    groups = cache_groups(model_def.cache_layers)
    pages = request["num_pages"] if isinstance(request["num_pages"], list) else [request["num_pages"]] * len(groups)
    limits = Limits(bucket.num_rows, bucket.num_tokens, request["page_size"])
    spec = cache_spec(groups, pages, limits.page_size, state_interval(model_def.cache_layers, limits))
    program = StepProgram(
        model_def=model_def,
        backend=backend,
        placement=placement,
        groups=attend_groups(spec),
        num_sampled_ids=model_def.vocab_size,
        max_logprobs=min(20, model_def.vocab_size),
    )
    caches = abstract_caches(model_def, backend, placement, spec)
    if request.get("program") == "encoder":
        group = spec.groups[-1]
        layout = BatchLayout(bucket, (spec.table_width(group, request["max_model_len"]),))
        encode = functools.partial(program.encode, layout=layout, layers=group.layers)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, caches), placement.sharding()
        return _Program(model_def, encode, layout.size, caches, (caches,), shardings)
    layout = BatchLayout.of(bucket, spec, request["max_model_len"])
    slots = SlotState.shapes(request.get("max_num_seqs") or bucket.num_rows, model_def.vocab_size, MAX_LOGIT_BIAS_ENTRIES)
    state = StepState(caches, _placed(slots, placement.sharding()))
    return _Program(model_def, functools.partial(program.step, layout=layout), layout.size, caches, (state,))


def _pooling(request: dict[str, Any], placement: Placement, bucket: Bucket) -> _Program:
    model_def = define_pooling(
        request["hf_config"], dtype=request["dtype"], tensor_parallel_size=placement.num_shards, token_ids=request.get("token_ids")
    )
    step = functools.partial(PoolingProgram(model_def, placement).step, bucket=bucket)
    return _Program(model_def, step, packed_size(bucket), out_shardings=placement.sharding())


def _placed(tree: Any, sharding: jax.sharding.Sharding) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)


@dataclass(frozen=True)
class Collectives:
    """Collective operations of one kind, inside of layers or outside of them: how many, and the bytes of all their results."""

    kind: str
    in_layers: bool
    count: int
    bytes: int


# Not those of the products of experts.
_KERNEL = re.compile(r'^(?!.*(?:ragged-dot|grouped_matmul)).*custom_call_target="(?:tpu_custom_call|mosaic_gpu)', re.MULTILINE)
_COLLECTIVE = re.compile(r" = (.+?) (all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute)(-start)?\(")
_SHAPE = re.compile(r"\b(pred|[a-z]+\d+[a-z0-9]*)\[([\d,]*)\]")


def collectives(hlo: str) -> list[Collectives]:
    """The collectives of a compiled program, given as text. What layers do carries the name of the function that runs them."""
    found: dict[tuple[str, bool], list[int]] = {}
    for line in hlo.splitlines():
        match = _COLLECTIVE.search(line)
        if match is None:
            continue
        sizes = [math.prod(map(int, filter(None, dims.split(",")))) * _itemsize(dtype) for dtype, dims in _SHAPE.findall(match[1])]
        # Asynchronous ones but all-reduce have their operands among their results.
        size = max(sizes) if match[3] and match[2] != "all-reduce" else sum(sizes)
        found.setdefault((match[2], "jit(run)" in line), []).append(size)
    return [Collectives(kind, in_layers, len(sizes), sum(sizes)) for (kind, in_layers), sizes in sorted(found.items())]


def _itemsize(hlo_dtype: str) -> int:
    bits = re.search(r"\d+", hlo_dtype)
    return max(1, int(bits[0]) // 8) if bits else 1  # pred has no number


if __name__ == "__main__":
    serve(compile_step)
