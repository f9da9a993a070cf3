"""`jaxllm collect-env`: versions, devices, processor, memory and folders, for a bug report."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from jaxllm.cli.parser import CommandParser

# What decides how jaxllm behaves; everything else that is installed goes in with --packages.
PACKAGES = (
    "jaxllm", "jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin", "flax", "numpy", "ml_dtypes",
    "transformers", "tokenizers", "safetensors", "huggingface-hub", "gguf", "fastapi", "uvicorn", "uvloop", "httptools",
    "msgspec", "pyzmq", "prometheus-client",
)  # fmt: skip
# Variables that libraries below us read. Others may hold secrets and stay out.
VARIABLES = (
    "JAX_PLATFORMS", "XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_COMPILATION_CACHE_DIR", "JAXLLM_CACHE", "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_MEM_FRACTION", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "HF_HOME", "HF_HUB_OFFLINE",
    "XDG_CACHE_HOME",
)  # fmt: skip
DEVICES_TIMEOUT_S = 120

# Runs in a process of its own: it loads jax, takes the accelerator for a moment, and may crash.
_DEVICES = """
import json, jax
devices = [{"id": d.id, "kind": d.device_kind, "platform": d.platform, "memory_bytes": (d.memory_stats() or {}).get("bytes_limit")}
           for d in jax.devices()]
print(json.dumps({"backend": jax.default_backend(), "processes": jax.process_count(), "devices": devices}))
"""


def build_parser() -> CommandParser:
    parser = CommandParser("collect-env", "Print versions, devices and memory, for a bug report.")
    parser.own.add_argument("--json", action="store_true", help="Print JSON")
    parser.own.add_argument("--packages", action="store_true", help="List every installed package")
    return parser


def main(argv: Sequence[str]) -> int:
    own = build_parser().parse(argv).own
    report = collect(all_packages=own.packages)
    print(json.dumps(report, indent=2) if own.json else as_text(report))
    return 0


def collect(*, all_packages: bool = False) -> dict[str, Any]:
    """Everything as a JSON object of sections."""
    return {
        "system": _system(),
        "processor": _processor(),
        "memory": _memory(),
        "devices": devices(),
        "folders": _folders(),
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "packages": _packages(all_packages),
    }


def devices() -> dict[str, Any]:
    """What jax sees, or why it sees nothing."""
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, "-c", _DEVICES]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEVICES_TIMEOUT_S, env=environment)
    except subprocess.TimeoutExpired:
        return {"error": f"jax did not list its devices within {DEVICES_TIMEOUT_S} s; is another process using the accelerator?"}
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        return {"error": lines[-1] if lines else f"the process that lists devices ended with status {done.returncode}"}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def _system() -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "python": sys.version.split()[0],
        "executable": sys.executable,
        "libc": " ".join(platform.libc_ver()),
    }


def _processor() -> dict[str, Any]:
    info = _proc_fields("/proc/cpuinfo")
    flags = set(info.get("flags", info.get("Features", "")).split())
    wanted = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "sve", "bf16")
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "model": info.get("model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": usable,
        "extensions": [flag for flag in wanted if flag in flags],
    }


def _memory() -> dict[str, Any]:
    import psutil

    memory = psutil.virtual_memory()
    return {"total_bytes": memory.total, "available_bytes": memory.available, "cgroup_limit_bytes": _cgroup_limit()}


def _cgroup_limit() -> int | None:
    """The container's limit, which the total does not show."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        # Version 1 spells "no limit" as a number near 2**63.
        return int(text) if text.isdigit() and int(text) < 2**60 else None
    return None


def _folders() -> dict[str, Any]:
    from jaxllm.weights.default_model import cache_dir

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    hub = Path(os.environ.get("HF_HOME") or cache / "huggingface")
    return {"jaxllm_cache": _folder(cache_dir()), "huggingface": _folder(hub)}


def _folder(path: Path) -> dict[str, Any]:
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file() and not file.is_symlink()) if path.is_dir() else None
    return {"path": str(path), "bytes": size}


def _packages(everything: bool) -> dict[str, str]:
    if everything:
        return dict(sorted((item.metadata["Name"], item.version) for item in metadata.distributions() if item.metadata["Name"]))
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _proc_fields(path: str) -> dict[str, str]:
    """The first of each `name : value` line; {} where the system has no such file."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return {}
    fields: dict[str, str] = {}
    for name, colon, value in (line.partition(":") for line in lines):
        if colon:
            fields.setdefault(name.strip(), value.strip())
    return fields


def as_text(report: dict[str, Any]) -> str:
    """The report as indented lines."""
    lines: list[str] = []
    for section, values in report.items():
        lines.append(f"{section}:")
        lines += [f"  {name}: {_shown(name, value)}" for name, value in values.items()]
    return "\n".join(lines)


def _shown(name: str, value: Any) -> str:
    if value is None:
        return "none"
    if name.endswith("bytes") and isinstance(value, int):
        return f"{value / 2**30:.1f} GiB" if value >= 2**30 else f"{value / 2**20:.1f} MiB"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(key, item)}" for key, item in value.items())
    if isinstance(value, list):
        separator = "; " if value and isinstance(value[0], dict) else " "
        return separator.join(_shown("", item) for item in value)
    return str(value)
