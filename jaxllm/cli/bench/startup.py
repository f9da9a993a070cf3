"""`jaxllm bench startup`: from the command to the first served token, without and with a compilation cache."""

from __future__ import annotations

import contextlib
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

from jaxllm.cli.bench.report import check_output_path, mean, print_rows, write_json
from jaxllm.cli.parser import CommandParser
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
    parser.own.add_argument("--num-iters-cold", type=int, default=1, metavar="N", help="Starts with an empty cache [1]")
    parser.own.add_argument("--num-iters-warm", type=int, default=3, metavar="N", help="Starts with a filled cache [3]")
    parser.own.add_argument("--timeout", type=float, default=900.0, metavar="S", help="Seconds to wait for the first token [900]")
    parser.own.add_argument("--output-json", metavar="FILE", help="Write the result as JSON")
    return parser


def main(argv: Sequence[str]) -> int:
    args = build_parser().parse(argv)
    own = args.own
    check_output_path(own.output_json)
    for name, low in (("num_iters_cold", 0), ("num_iters_warm", 0)):
        if getattr(own, name) < low:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {low}, got {getattr(own, name)}")
    # Wrong options are found here, not in a child's log.
    EngineConfig.from_options(**args.only(CONFIG_GROUPS))
    for option in ("compilation_cache_dir", "compilation_cache"):
        if option in args.options:
            raise ConfigError(f"--{option.replace('_', '-')} cannot be combined with this benchmark, which brings caches of its own")
    flags = _serve_flags(argv, build_parser())

    cold, warm = [], []
    with tempfile.TemporaryDirectory(prefix="jaxllm-startup-") as folder:
        for index in range(own.num_iters_cold):
            cold.append(measure_start(flags, Path(folder) / f"cold-{index}", own.timeout))
        if own.num_iters_warm:
            filled = Path(folder) / "cold-0"
            if not own.num_iters_cold:
                measure_start(flags, filled, own.timeout)
            warm = [measure_start(flags, filled, own.timeout) for _ in range(own.num_iters_warm)]
    result = {"cold": cold, "warm": warm}
    for name, starts in result.items():
        if starts:
            rows = [(phase.replace("_", " ").replace(" s", " (s)"), mean([start[phase] for start in starts])) for phase in starts[0]]
            print_rows(f"Start-up, {name} cache, mean of {len(starts)}", rows)
    write_json(own.output_json, result)
    return 0


def _serve_flags(argv: Sequence[str], parser: CommandParser) -> list[str]:
    """The engine's part of the command line, as it was written."""
    own = {string for action in parser.own._group_actions for string in action.option_strings} - {"--config"}
    flags, words = [], iter(argv)
    for word in words:
        name, equals, _ = word.partition("=")
        if name.replace("_", "-") not in own:
            flags.append(word)
        elif not equals:
            next(words, None)
    return flags


def measure_start(flags: Sequence[str], cache: Path, timeout: float) -> dict[str, float]:
    """Start a server, take one token, stop it.

    Returns:
        Seconds from the start of the process: `http_answers_s`, `ready_s`, `first_token_s`; and `stop_s`, the time it took to stop.

    Raises:
        JaxllmError: the server ended or did not answer in time; the message holds the end of its log.
    """
    import httpx

    port = free_port()
    command = [sys.executable, "-m", "jaxllm.cli.main", "serve", *flags, "--host=127.0.0.1", f"--port={port}"]
    with tempfile.TemporaryFile() as log:
        started = time.perf_counter()
        process = subprocess.Popen([*command, f"--compilation-cache-dir={cache}"], stdout=log, stderr=subprocess.STDOUT)
        with stopped_at_the_end(process), httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=timeout, trust_env=False) as client:
            deadline = started + timeout

            def wait_for(path: str, ready: Any) -> float:
                while time.perf_counter() < deadline:
                    if process.poll() is not None:
                        raise JaxllmError(f"the server ended with status {process.returncode} while it started:\n{tail(log)}")
                    with contextlib.suppress(httpx.TransportError):
                        if ready(client.get(path).status_code):
                            return time.perf_counter() - started
                    time.sleep(POLL_S)
                raise JaxllmError(f"the server did not start within {timeout:g} s:\n{tail(log)}")

            answers = wait_for("/ready", lambda status: True)
            ready = wait_for("/ready", lambda status: status == httpx.codes.OK)
            response = client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 1, "temperature": 0})
            first = time.perf_counter() - started
            if response.status_code != httpx.codes.OK:
                raise JaxllmError(f"the first request failed with HTTP {response.status_code}: {response.text[:200]}")
            stopping = time.perf_counter()
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_TIMEOUT_S)
            return {"http_answers_s": answers, "ready_s": ready, "first_token_s": first, "stop_s": time.perf_counter() - stopping}


@contextlib.contextmanager
def stopped_at_the_end(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Leave no process behind, whatever happens."""
    try:
        yield
    finally:
        if process.poll() is None:
            process.terminate()
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
