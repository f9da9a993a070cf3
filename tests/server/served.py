"""`jaxllm serve` in a process of its own, as users run it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil

NAME = "scripted"


class Served:
    """A `jaxllm serve` process that is ready. Its model is served as NAME, with a context of `max_model_len` tokens."""

    def __init__(self, model: Path, *flags: str, max_model_len: int):
        command = [sys.executable, "-m", "jaxllm.cli.main", "serve", str(model), "--host", "127.0.0.1", "--port", "0", *flags]
        command += ["--served-model-name", NAME, "--max-model-len", str(max_model_len), "--max-num-seqs", "8"]
        env = {**os.environ, "JAX_PLATFORMS": "cpu"}
        self.process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.log: list[str] = []
        self.url = ""
        self._ready = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()
        assert self._ready.wait(180), "".join(self.log)
        assert self.url, "".join(self.log)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log.append(line)
            if match := re.search(rf"Serving {NAME} at (\S+)", line):
                self.url = match[1]
                self._ready.set()
        self._ready.set()

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def post(self, path: str, **body) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60)

    def metric(self, name: str) -> float:
        found = re.search(rf"^jaxllm:{name}(?:{{[^}}]*}})? (\S+)$", httpx.get(self.url + "/metrics").text, re.MULTILINE)
        assert found, name
        return float(found[1])

    def kill(self) -> None:
        for process in [*self.children(), psutil.Process(self.process.pid)] if self.process.poll() is None else []:
            process.kill()
        self.process.wait(10)


def eventually(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether `condition` comes true within the time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False
