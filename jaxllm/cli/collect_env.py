"""`jaxllm collect-env`: versions, devices, processor and memory as JSON, for a bug report."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from jaxllm.cli.isolated import json_of
from jaxllm.cli.parser import CommandParser
from jaxllm.errors import JaxllmError

# Beginnings of variables that libraries below us read. Others may hold secrets and stay out.
VARIABLES = (
    "JAX_",
    "XLA_",
    "LIBTPU_",
    "TPU_",
    "CUDA_",
    "OMP_",
    "LD_LIBRARY_PATH",
    "JAXLLM_CACHE",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "XDG_CACHE_HOME",
)
DEVICES_TIMEOUT_S = 120
_DEVICES = """
import json, jax
devices = [{"id": d.id, "kind": d.device_kind, "platform": d.platform, "memory_bytes": (d.memory_stats() or {}).get("bytes_limit")}
           for d in jax.devices()]
print(json.dumps({"backend": jax.default_backend(), "processes": jax.process_count(), "devices": devices}))
"""


def build_parser() -> CommandParser:
    return CommandParser("collect-env", "Print versions, devices and memory as JSON, for a bug report.")


def main(argv: Sequence[str]) -> int:
    build_parser().parse(argv)
    print(json.dumps(collect(), indent=2))
    return 0


def collect() -> dict[str, Any]:
    """Everything as a JSON object of sections."""
    import psutil

    memory = psutil.virtual_memory()
    return {
        "system": {"platform": platform.platform(), "python": sys.version, "executable": sys.executable},
        "processor": {"model": _processor(), "cores": os.cpu_count(), "usable_cores": len(psutil.Process().cpu_affinity() or ())},
        "memory": {"total_bytes": memory.total, "available_bytes": memory.available},
        "devices": devices(),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)},
        "packages": dict(sorted((item.name, item.version) for item in metadata.distributions())),
    }


def devices() -> dict[str, Any]:
    """What jax sees, or why it sees nothing."""
    try:
        return json_of("-c", _DEVICES, timeout_s=DEVICES_TIMEOUT_S)
    except JaxllmError as error:
        return {"error": str(error)}


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
