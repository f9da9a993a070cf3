"""`jaxllm bench startup`: from the command to the first served token, without and with a compilation cache."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxllm.cli.bench.report import add_output_flag, mean, report
from jaxllm.cli.parser import CommandParser, at_least
from jaxllm.config import CONFIG_GROUPS, EngineConfig
from jaxllm.errors import ConfigError, JaxllmError

POLL_S = 0.02
STOP_TIMEOUT_S = 30.0
PROMPT = "The capital of France is"


def build_parser() -> CommandParser:
    parser = CommandParser(
        "bench startup",
        "Start the server, ask it for one token and stop it, with an empty compilation cache (cold) and a filled one (warm).",
        groups=CONFIG_GROUPS,
        positional_model=True,
    )
    own = parser.own
    own.add_argument("--num-iters-cold", type=at_least(1), default=1, metavar="N", help="Starts with an empty cache [1]")
    own.add_argument("--num-iters-warm", type=at_least(0), default=3, metavar="N", help="Starts with a filled cache [3]")
    own.add_argument("--timeout", type=float, default=900.0, metavar="S", help="Seconds to wait for the first token [900]")
    add_output_flag(own)
    return parser


def main(argv: Sequence[str]) -> int:
    args = build_parser().parse(argv)
    own = args.own
    # Wrong values are reported by this process.
    EngineConfig.from_options(**args.options)
    for option in ("compilation_cache_dir", "compilation_cache"):
        if option in args.options:
            raise ConfigError(f"--{option.replace('_', '-')} cannot be combined with this benchmark, which brings caches of its own")
    with tempfile.TemporaryDirectory(prefix="jaxllm-startup-") as folder:
        cold = [measure_start(args.options, Path(folder) / f"cold-{index}", own.timeout) for index in range(own.num_iters_cold)]
        warm = [measure_start(args.options, Path(folder) / "cold-0", own.timeout) for _ in range(own.num_iters_warm)]
    result: dict[str, Any] = {"cold": cold, "warm": warm}
    for name, starts in (("cold", cold), ("warm", warm)):
        result[f"{name}_mean"] = {phase: mean([start[phase] for start in starts]) for phase in cold[0]}
    report("Start-up", result, own.output_json)
    return 0


def measure_start(options: dict[str, Any], cache: Path, timeout: float) -> dict[str, float]:
    """Start a server with these options, take one token, stop it.

    Returns:
        Seconds from the start of the process: `http_answers_s`, `ready_s` and `first_token_s`.

    Raises:
        JaxllmError: the server ended or did not answer in time; the message holds the end of its log.
    """
    import httpx

    port, config = free_port(), cache.with_suffix(".yaml")
    config.write_text(json.dumps(options | {"compilation_cache_dir": str(cache)}))
    command = [sys.executable, "-m", "jaxllm.cli.main", "serve", f"--config={config}", "--host=127.0.0.1", f"--port={port}"]
    with tempfile.TemporaryFile() as log:
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        with stopped_at_the_end(process), httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=timeout, trust_env=False) as client:

            def wait_for(ready: Any) -> float:
                while time.perf_counter() < started + timeout:
                    if process.poll() is not None:
                        raise JaxllmError(f"the server ended with status {process.returncode} while it started:\n{tail(log)}")
                    with contextlib.suppress(httpx.TransportError):
                        if ready(client.get("/ready").status_code):
                            return time.perf_counter() - started
                    time.sleep(POLL_S)
                raise JaxllmError(f"the server did not start within {timeout:g} s:\n{tail(log)}")

            answers = wait_for(lambda status: True)
            ready = wait_for(lambda status: status == httpx.codes.OK)
            response = client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 1, "temperature": 0})
            first = time.perf_counter() - started
            if response.status_code != httpx.codes.OK:
                raise JaxllmError(f"the first request failed with HTTP {response.status_code}: {response.text[:200]}")
            return {"http_answers_s": answers, "ready_s": ready, "first_token_s": first}


@contextlib.contextmanager
def stopped_at_the_end(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Leave no process behind, whatever happens."""
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_port() -> int:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def tail(log: Any, size: int = 2000) -> str:
    """The end of what a process wrote."""
    end = log.seek(0, os.SEEK_END)
    log.seek(max(0, end - size))
    text: str = log.read().decode(errors="replace")
    return text.strip()
