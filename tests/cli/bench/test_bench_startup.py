"""The start-up benchmark: which flags reach the server, and what happens when it does not start."""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jaxllm.cli.bench import startup
from jaxllm.cli.main import main
from jaxllm.errors import JaxllmError

START = {"http_answers_s": 1.0, "ready_s": 2.0, "first_token_s": 3.0}

SERVER = """
import http.server, json, sys
port = int(sys.argv[-1].partition("=")[2])
class Handler(http.server.BaseHTTPRequestHandler):
    asked = 0
    def do_GET(self):
        Handler.asked += 1
        self.send_response(200 if Handler.asked > 2 else 503)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def do_POST(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, Any], str]]:
    """The options and the cache's name of every measured start; none is really started."""
    seen: list[tuple[dict[str, Any], str]] = []

    def measure(options: dict[str, Any], cache: Path, timeout: float) -> dict[str, float]:
        seen.append((options, cache.name))
        return START

    monkeypatch.setattr(startup, "measure_start", measure)
    return seen


def test_the_server_reads_its_options_from_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    run_instead_of_the_server(monkeypatch, "import sys; sys.exit(open(sys.argv[5].partition('=')[2]).read())")

    with pytest.raises(JaxllmError, match=r'"seed": 1, "compilation_cache_dir": ".*cache"'):
        startup.measure_start({"seed": 1}, tmp_path / "cache", timeout=30)


def run_instead_of_the_server(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    real = startup.subprocess.Popen

    def popen(command: list[str], **options: Any) -> Any:
        return real([sys.executable, "-c", program, *command], **options)

    monkeypatch.setattr(startup.subprocess, "Popen", popen)


def test_the_engines_options_reach_the_server(starts: list[tuple[dict[str, Any], str]]):
    argv = ["bench", "startup", "MODEL", "--num-iters-cold=1", "--max-num-seqs", "4", "--num-iters-warm", "2", "--seed=1"]

    assert main(argv) == 0

    assert [options for options, _ in starts] == [{"model": "MODEL", "max_num_seqs": 4, "seed": 1}] * 3


def test_cold_starts_have_empty_caches_and_warm_ones_share_a_filled_one(starts: list[tuple[dict[str, Any], str]]):
    main(["bench", "startup", "--num-iters-cold", "2", "--num-iters-warm", "2"])
    assert [cache for _, cache in starts] == ["cold-0", "cold-1", "cold-0", "cold-0"]


@pytest.mark.parametrize(
    "argv", [["--num-iters-warm", "-1"], ["--compilation-cache-dir", "cache"], ["--block-size", "17"], ["--host", "x"]]
)
def test_wrong_flags_start_nothing(argv: list[str], starts: list[tuple[dict[str, Any], str]]):
    assert main(["bench", "startup", *argv]) == 2
    assert starts == []


def test_phases_are_in_order_and_the_server_is_gone_afterwards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    run_instead_of_the_server(monkeypatch, SERVER)

    phases = startup.measure_start({}, tmp_path / "cache", timeout=30)

    assert 0 < phases["http_answers_s"] <= phases["ready_s"] <= phases["first_token_s"]


def test_a_server_that_ends_is_reported_with_its_last_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    run_instead_of_the_server(monkeypatch, "import sys; sys.exit('no such model')")

    with pytest.raises(JaxllmError, match=r"(?s)ended with status 1.*no such model"):
        startup.measure_start({}, tmp_path / "cache", timeout=30)


def test_a_server_that_never_answers_is_given_up_and_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    run_instead_of_the_server(monkeypatch, "import time; print('loading', flush=True); time.sleep(60)")
    started = time.monotonic()

    with pytest.raises(JaxllmError, match=r"did not start within 1 s"):
        startup.measure_start({}, tmp_path / "cache", timeout=1)

    assert time.monotonic() - started < 30


def test_only_the_end_of_a_long_log_is_shown():
    assert startup.tail(io.BytesIO(b"a" * 5000 + b"end"), size=10) == "aaaaaaaend"
