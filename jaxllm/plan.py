"""What an engine would need and could do on accelerators that are not there: the arithmetic of `jaxllm plan`, in a process of its own.

The request: target, config (an `EngineConfig` as JSON), kind, name and hf_config (of `ModelFiles`), context_len (tokens that each request
holds in the estimates, or None).
The answer: see `make_plan`; or {"error": name of a type in `jaxllm.errors`, "message"}.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxllm.config import EngineConfig
from jaxllm.errors import ConfigError, JaxllmError, OutOfMemoryPlanError
from jaxllm.launch import compute_dtype, define, named_dtype, step_limits
from jaxllm.model_files import ModelFiles
from jaxllm.models.build import ModelDef
from jaxllm.ops.attention import AttentionBackend, choose_backend
from jaxllm.runner.buckets import bucket_ladder
from jaxllm.runner.memory import Limits, MemoryPlan, plan_memory, weight_bytes
from jaxllm.runner.mesh import MESH_AXES, Placement
from jaxllm.runner.roofline import Roofline, Work
from pallas_kernels.aot import serve
from pallas_kernels.devices import DEVICES, Device, Target, parse_target

_BATCHES = (1, 8, 64)
_DEFAULT_CONTEXT = 2048


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """`make_plan`, with errors as data."""
    try:
        return make_plan(request)
    except JaxllmError as error:
        return {"error": type(error).__name__, "message": str(error)}


def make_plan(request: dict[str, Any]) -> dict[str, Any]:
    """Plan an engine for a target. Sizes in bytes and per device, times in seconds.

    Raises:
        ConfigError, ModelLoadError: what `serve` would raise.
    """
    target = parse_target(request["target"])
    device = target.device
    config = EngineConfig.from_json(request["config"])
    if config.model.dtype == "auto" and request["kind"] == "hf" and named_dtype(request["hf_config"]) is None:
        # The tensors would say; those of models that leave it open are bfloat16 as a rule.
        config = replace(config, model=replace(config.model, dtype="bfloat16"))
    path = Path(request["name"])
    files = ModelFiles(
        kind=request["kind"], path=path, config=request["hf_config"], generation_config={}, name=request["name"], tokenizer_path=path
    )
    engine = _Engine(config, files, device, config.parallel.tensor_parallel_size, {})
    found: dict[str, Any] = {
        "model": files.name,
        "architecture": engine.model_def.architecture,
        "dtype": engine.dtype,
        "num_params": engine.model_def.num_params,
        "target": target.name,
        "num_chips": target.num_chips,
        "num_devices": target.num_devices,
        "tensor_parallel_size": engine.shards,
        "device": {name: getattr(device, name) for name in ("kind", "hbm_bytes", "hbm_bytes_per_s", "bf16_flops", "link_bytes_per_s")},
        "attention": engine.backend.name,
        "memory": {"usable": int(device.hbm_bytes * config.cache.gpu_memory_utilization), "weights": engine.weights},
    }
    try:
        plan = engine.plan()
    except OutOfMemoryPlanError as error:
        return found | {"fits": False, "reason": str(error), "would_fit": list(_what_would_fit(engine))}
    return found | {"fits": True} | _capacity(engine, plan, request.get("context_len"))


class _Engine:
    """The abstract parts of an engine on some devices of a kind. models: by number of shards, those defined so far."""

    def __init__(self, config: EngineConfig, files: ModelFiles, device: Device, shards: int, models: dict[int, ModelDef]):
        self.files, self.models = files, models
        self.config = replace(config, parallel=replace(config.parallel, tensor_parallel_size=shards))
        self.device = device
        self.shards = shards
        self.dtype = compute_dtype(config, files, None, device.platform)
        self.backend: AttentionBackend = choose_backend(device.platform, device.kind)
        if shards not in models:
            models[shards] = define(files, self.dtype, self.config, config.model.max_model_len)
        self.model_def = models[shards]
        self.limits: Limits = step_limits(config, device.platform, self.model_def)
        mesh = AbstractMesh((1, 1, shards), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))
        self.placement = Placement(cast(Mesh, mesh))

    @property
    def weights(self) -> int:
        return weight_bytes(self.model_def, self.placement)

    def plan(self) -> MemoryPlan:
        return plan_memory(
            self.model_def,
            self.backend,
            self.placement,
            self.config.cache,
            self.limits,
            max_model_len=self.config.model.max_model_len,
            device_bytes=self.device.hbm_bytes,
        )


def _what_would_fit(engine: _Engine) -> Iterator[str]:
    """The smallest target of each kind of device that the engine fits."""
    whole = engine.weights * engine.shards
    for device in DEVICES.values():
        for size in device.slices:
            target = Target(device, size)
            if whole / target.num_devices > 2 * device.hbm_bytes:
                continue  # far from it, although some of these weights may be copies
            try:
                _Engine(engine.config, engine.files, device, target.num_devices, engine.models).plan()
            except (ConfigError, OutOfMemoryPlanError):
                continue
            yield target.name
            break


def _capacity(engine: _Engine, plan: MemoryPlan, context_len: int | None) -> dict[str, Any]:
    """What fits, and the rooflines."""
    limits, device = engine.limits, engine.device
    roofline = Roofline.of(engine.model_def, engine.backend, engine.placement, limits.page_size)
    context = min(context_len or _DEFAULT_CONTEXT, plan.max_model_len)
    most = max(1, min(limits.max_num_seqs, plan.cache_tokens // context))
    chunk = min(limits.max_num_batched_tokens, plan.max_model_len)

    def described(work: Work) -> dict[str, Any]:
        return {"flops": work.flops, "bytes": work.bytes, "seconds": work.seconds(device), "bound": work.bound(device)}

    return {
        "memory": {"usable": plan.total} | {name: getattr(plan, name) for name in ("weights", "sampling_state", "temporaries", "kv_cache")},
        "max_model_len": plan.max_model_len,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "page_size": limits.page_size,
        "num_pages": [group.num_pages for group in plan.cache_spec.groups],
        "kv_bytes_per_token": roofline.kv_bytes_per_token,
        "kv_tokens": plan.cache_tokens,
        "requests": {str(length): plan.cache_tokens / length for length in sorted({plan.max_model_len, context}, reverse=True)},
        "context_len": context,
        "decode": [
            {"batch": batch, **described(roofline.decode(batch, context))} for batch in sorted({b for b in _BATCHES if b < most} | {most})
        ],
        "prefill": {"tokens": chunk, **described(roofline.prefill(chunk))},
        "buckets": [[bucket.num_tokens, bucket.num_rows] for bucket in bucket_ladder(limits.max_num_seqs, limits.max_num_batched_tokens)],
        "num_layers": len(engine.model_def.cache_layers),
    }


if __name__ == "__main__":
    serve(answer)
