"""Programs that load jax, take the accelerator for a moment and may crash: they run in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from jaxllm.errors import JaxllmError


def json_of(*arguments: str, timeout_s: float) -> dict[str, Any]:
    """The JSON object that `python ARGUMENTS` prints last.

    Raises:
        JaxllmError: it failed, or took too long.
    """
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    try:
        done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=timeout_s, env=environment)
    except subprocess.TimeoutExpired:
        raise JaxllmError(f"jax did not answer within {timeout_s} s; is another process using the accelerator?") from None
    if done.returncode != 0:
        raise JaxllmError((done.stderr.strip().splitlines() or [f"the process ended with status {done.returncode}"])[-1])
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found
