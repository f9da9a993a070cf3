"""Compile for accelerators that are not there: the real compiler for a real target, in a process of its own with a time limit.

    compile_isolated("pallas_kernels.ragged_paged_attention.aot", {"target": "v6e:1x1", ...}, timeout_s=120) -> dict

runs `python -m MODULE` with the request as JSON on its standard input; the module answers through `serve`. A compiler given a wrong shape
may abort its process or take minutes: neither harms the caller.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

# Topologies by the names that people know, each with jax's device_kind and what libtpu calls the accelerator.
TPU_KINDS = {
    "v4": "TPU v4",
    "v5e": "TPU v5 lite",
    "v5p": "TPU v5",
    "v6e": "TPU v6 lite",
    "tpu7x": "TPU7x",
}
_MARK = "AOT-RESULT "


class AotError(RuntimeError):
    """The target's compiler refused, crashed or took too long; the message is the compiler's last word."""


def missing_tpu_compiler() -> str | None:
    """Why nothing can be compiled for TPUs, or None."""
    if importlib.util.find_spec("libtpu") is None:
        return "the TPU compiler is not installed; pip install 'jaxllm[plan-tpu]'"
    return None


def compile_isolated(module: str, request: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
    """The answer of `module` to the request.

    Raises:
        AotError: there is no compiler, or it failed.
    """
    reason = missing_tpu_compiler()
    if reason is not None:
        raise AotError(reason)
    quiet = {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_MIN_LOG_LEVEL": "3",
        "TPU_STDERR_LOG_LEVEL": "3",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_ACCELERATOR_TYPE": f"{request['target'].partition(':')[0]}-4",
    }
    command = [sys.executable, "-m", module]
    try:
        done = subprocess.run(
            command, input=json.dumps(request), capture_output=True, text=True, timeout=timeout_s, env=os.environ | quiet, check=False
        )
    except subprocess.TimeoutExpired:
        raise AotError(f"{module} {dict(request)} was not compiled in {timeout_s:.0f} s") from None
    for line in done.stdout.splitlines():
        if line.startswith(_MARK):
            return json.loads(line.removeprefix(_MARK))
    raise AotError(f"{module} {dict(request)} failed (exit {done.returncode}): {done.stderr.strip()[-2000:]}")


def serve(answer: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
    """The other side of `compile_isolated`, for a module's `__main__`."""
    print(_MARK + json.dumps(answer(json.load(sys.stdin))), flush=True)


def target_mesh(target: str, axes: tuple[str, ...] = ("model",)) -> Any:
    """A mesh over all chips of a target such as "v6e:2x2", its last axis over all of them. Imports jax; needs libtpu."""
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import AxisType, Mesh

    devices: Any = np.array(topologies.get_topology_desc(platform="tpu", topology_name=_topology(target)).devices)
    return Mesh(devices.reshape((1,) * (len(axes) - 1) + (-1,)), axes, axis_types=(AxisType.Auto,) * len(axes))


def _topology(target: str) -> str:
    """Topologies of v4, v5p and tpu7x have three dimensions."""
    generation, _, shape = target.partition(":")
    return target if generation in ("v5e", "v6e") or shape.count("x") == 2 else f"{generation}:{shape}x1"
