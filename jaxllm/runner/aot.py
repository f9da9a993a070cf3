"""Compile the whole step for TPUs that are not there, in a process of its own (see `pallas_kernels/aot.py`).

The request: target ("v6e:2x2"; all its chips share the model), hf_config, dtype, num_tokens, num_rows, page_size, max_model_len, num_pages.
The answer, per chip in bytes: argument_bytes, temp_bytes, alias_bytes, cache_bytes (page pools); and seconds, all_reduces.
"""

from __future__ import annotations

import functools
import math
import time
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.models.build import define_model
from jaxllm.ops.attention import choose_backend
from jaxllm.runner.batch import BatchLayout
from jaxllm.runner.buckets import Bucket
from jaxllm.runner.memory import abstract_caches, cache_groups, cache_spec
from jaxllm.runner.mesh import MESH_AXES, Placement
from jaxllm.runner.sampler import SlotState
from jaxllm.runner.step import StepProgram, StepState
from jaxllm.sampling_params import MAX_LOGIT_BIAS_ENTRIES
from pallas_kernels.aot import serve, target_mesh


def compile_step(request: dict[str, Any]) -> dict[str, Any]:
    """Compile one bucket of a model for a target."""
    placement = Placement(target_mesh(request["target"], MESH_AXES))
    backend = choose_backend("tpu", placement.mesh.devices.flat[0].device_kind)
    model_def = define_model(
        request["hf_config"],
        dtype=request["dtype"],
        tensor_parallel_size=placement.num_shards,
        max_model_len=request["max_model_len"],
    )
    groups = cache_groups(model_def.cache_layers)
    bucket = Bucket(request["num_tokens"], request["num_rows"])
    layout = BatchLayout(bucket, (-(-request["max_model_len"] // request["page_size"]),) * len(groups))

    def place(tree: Any, sharding: jax.sharding.Sharding) -> Any:
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)

    params = [place(model_def.shapes[name], placement.sharding(model_def.axes[name])) for name in model_def.names]
    pools = cache_spec(groups, [request["num_pages"]] * len(groups), request["page_size"])
    caches = abstract_caches(model_def, backend, placement, pools)
    slots = SlotState.shapes(request["num_rows"], model_def.vocab_size, MAX_LOGIT_BIAS_ENTRIES)
    state = StepState(caches, place(slots, placement.sharding()))
    packed = jax.ShapeDtypeStruct((layout.size,), jnp.int32, sharding=placement.sharding())
    program = StepProgram(
        model_def=model_def,
        backend=backend,
        placement=placement,
        window_groups={window: g for g, window in enumerate(groups)},
        num_sampled_ids=model_def.vocab_size,
        max_logprobs=min(20, model_def.vocab_size),
    )
    step = jax.jit(functools.partial(program.step, layout=layout), donate_argnums=1)
    started = time.perf_counter()
    with jax.sharding.use_abstract_mesh(placement.mesh.abstract_mesh):
        compiled = step.trace(params, state, packed).lower(lowering_platforms=("tpu",)).compile()
    memory = compiled.memory_analysis()
    text = compiled.as_text()
    return {
        "seconds": round(time.perf_counter() - started, 2),
        "argument_bytes": memory.argument_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "cache_bytes": sum(math.prod(pages.sharding.shard_shape(pages.shape)) * pages.dtype.itemsize for pages in jax.tree.leaves(caches)),
        "all_reduces": text.count(" all-reduce(") + text.count(" all-reduce-start("),
        "kernels": text.count("tpu_custom_call"),
    }


if __name__ == "__main__":
    serve(compile_step)
