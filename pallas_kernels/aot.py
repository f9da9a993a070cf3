"""Compile for accelerators that are not there: the real compiler for a real target, in a process of its own with a time limit.

    compile_isolated("pallas_kernels.ragged_paged_attention.aot", {"target": "v6e:1x1", ...}, timeout_s=120) -> dict

runs `python -m MODULE` with the request as JSON on its standard input; the module answers through `serve`. A compiler given a wrong shape
may abort its process or take minutes: neither harms the caller.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pallas_kernels.devices import Device, parse_target

_MARK = "AOT-RESULT "
# What jax calls the platform where it compiles.
LOWERING_PLATFORMS = {"tpu": "tpu", "gpu": "cuda"}
# To choose CUB's sort, XLA asks the GPU itself for the scratch memory; its own sort takes about as much.
_DEVICELESS_OPTIONS = {"gpu": {"xla_gpu_enable_cub_radix_sort": False}}
_CUDA_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")


class AotError(RuntimeError):
    """The target's compiler refused, crashed or took too long; the message is the compiler's last word."""


def missing_compiler(platform: str) -> str | None:
    """Why nothing can be compiled for "tpu" or "gpu" here, or None."""
    if platform == "tpu":
        found, name, extra = _has_module("libtpu"), "TPU compiler (libtpu)", "plan-tpu"
    else:
        found, name, extra = any(map(_has_module, _CUDA_PLUGINS)), "CUDA compiler (jax's CUDA plugin)", "plan-gpu"
    return None if found else f"the {name} is not installed; pip install 'jaxllm[{extra}]'"


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of the parent package
        return False


def compile_isolated(module: str, request: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
    """The answer of `module` to the request, which names a `target`.

    Raises:
        UnknownTargetError: there is no such target.
        AotError: there is no compiler, or it failed.
    """
    device = parse_target(request["target"]).device
    reason = missing_compiler(device.platform)
    if reason is not None:
        raise AotError(reason)
    return run_isolated(module, request, timeout_s=timeout_s)


def run_isolated(module: str, request: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
    """The answer of `module`, which needs no compiler.

    Raises:
        AotError: it failed.
    """
    command, environment = [sys.executable, "-m", module], os.environ | compiler_environment(request["target"])
    try:
        done = subprocess.run(
            command, input=json.dumps(request), capture_output=True, text=True, timeout=timeout_s, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        raise AotError(f"{module} did not answer for {request['target']} within {timeout_s:.0f} s") from None
    for line in done.stdout.splitlines():
        if line.startswith(_MARK):
            return json.loads(line.removeprefix(_MARK)) | _assembler_report(done.stdout + done.stderr)
    raise AotError(f"{module} failed for {request['target']} (exit {done.returncode}): {done.stderr.strip()[-2000:]}")


def compiler_environment(target: str) -> dict[str, str]:
    """What the compilers want to find in the environment of a process, before it imports jax, to compile for a target without it."""
    return {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_MIN_LOG_LEVEL": "3",
        "TPU_STDERR_LOG_LEVEL": "3",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_ACCELERATOR_TYPE": f"{target.partition(':')[0]}-4",
        "MOSAIC_GPU_DUMP_PTXAS": "1",
    }


def _assembler_report(text: str) -> dict[str, int]:
    """What the GPU's assembler said of Mosaic kernels: most registers of a thread, and bytes spilled; {} where there are none."""
    registers, spilled = (list(map(int, re.findall(pattern, text))) for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill"))
    return {"registers": max(registers), "spill_bytes": sum(spilled)} if registers else {}


def serve(answer: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
    """The other side of `compile_isolated`, for a module's `__main__`."""
    print(_MARK + json.dumps(answer(json.load(sys.stdin))), flush=True)


def target_mesh(target: str, axes: tuple[str, ...] = ("model",), num_devices: int | None = None) -> Any:
    """A mesh over the first `num_devices` (None: all) devices of a target, its last axis over all of them. Imports jax; needs the target's
    compiler.
    """
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import AxisType, Mesh

    where = parse_target(target)
    if where.device.platform == "tpu":
        topology = topologies.get_topology_desc(platform="tpu", topology_name=where.name)
    else:
        spec = _gpu_target_config(where.device)
        topology = topologies.get_topology_desc(platform="cuda", topology=f"1x1x{where.num_chips}", target_config=spec)
    devices: Any = np.array(topology.devices[:num_devices])
    return Mesh(devices.reshape((1,) * (len(axes) - 1) + (-1,)), axes, axis_types=(AxisType.Auto,) * len(axes))


def compile_for(function: Any, mesh: Any, *arguments: Any, **keywords: Any) -> Any:
    """Compile a jitted function for the devices of a mesh, with abstract arguments that carry their shardings."""
    import jax

    platform = mesh.devices.flat[0].platform
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = function.trace(*arguments, **keywords).lower(lowering_platforms=(LOWERING_PLATFORMS[platform],))
        return lowered.compile(compiler_options=_DEVICELESS_OPTIONS.get(platform))


def temp_bytes(compiled: Any) -> int:
    """Bytes of HBM that a compiled program allocates for a call, beside its arguments and results."""
    memory = compiled.memory_analysis()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    # The TPU compiler's size of temporaries counts the gaps of their heap once more; newer jax says what is allocated in all.
    allocated = getattr(memory, "total_allocation_bytes", 0) - memory.argument_size_in_bytes - results
    return allocated if 0 < allocated < memory.temp_size_in_bytes else memory.temp_size_in_bytes


def _gpu_target_config(device: Device) -> str:
    """What XLA must know of a GPU: a text proto out of jax's CUDA plugin, which carries one for each GPU that XLA's own tests compile for.

    Raises:
        AotError: the plugin carries none for this GPU.
    """
    spec = next(filter(None, (importlib.util.find_spec(name) for name in _CUDA_PLUGINS if _has_module(name))))
    folder = Path(next(iter(spec.submodule_search_locations or ())))
    data = (folder / "xla_cuda_plugin.so").read_bytes()
    described = re.compile(rf'device_description_str: "({re.escape(device.kind)}[^"]*)"')
    found = {}
    for match in re.finditer(rb"gpu_device_info \{[^\0]*", data):
        text = match[0].decode("utf-8", "replace")
        if name := described.search(text):
            found[name[1]] = text
    if found:
        return found[min(found, key=len)]  # the others are parts of one
    raise AotError(f"this CUDA plugin has no description of {device.kind}; that of jax 0.12 has one")
