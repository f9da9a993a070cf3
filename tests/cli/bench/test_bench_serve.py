"""The serving benchmark against a small SSE server, and the arithmetic of its metrics."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from jaxllm.cli.bench.load import Outcome, serving_metrics
from jaxllm.cli.main import main


class Handler(BaseHTTPRequestHandler):
    """Streams as many chunks as were asked for; refuses prompts of two tokens, breaks off prompts of three."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._send(200, json.dumps({"data": [{"id": "tiny"}]}))

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        length = len(request["prompt"])
        if length == 2:
            self._send(400, json.dumps({"error": {"message": "two tokens are too few"}}))
            return
        events = [{"choices": [{"text": "x"}]} for _ in range(request["max_tokens"])]
        events.append({"choices": [], "usage": {"completion_tokens": request["max_tokens"]}})
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        self._send(200, body if length == 3 else body + "data: [DONE]\n\n")

    def _send(self, status: int, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def base_url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_load_is_measured_and_written(base_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "out.json"
    argv = ["bench", "serve", "--base-url", base_url, "--num-prompts", "8", "--input-len", "5", "--output-len", "4"]

    assert main([*argv, "--max-concurrency", "3", "--output-json", str(path)]) == 0

    result = json.loads(path.read_text())
    assert (result["completed"], result["failed"], result["model_id"]) == (8, 0, "tiny")
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (40, 32)
    assert 1 <= result["max_concurrent_requests"] <= 3
    assert all(result[f"{kind}_{name}_ms"] >= 0 for kind in ("mean", "median", "p90", "p99") for name in ("ttft", "tpot", "itl", "e2el"))
    out = capsys.readouterr().out
    assert "mean_ttft_ms:" in out
    assert "p99_e2el_ms:" in out


def test_failed_requests_are_counted_apart(base_url: str, tmp_path: Path):
    workload, path = tmp_path / "work.json", tmp_path / "out.json"
    workload.write_text(json.dumps({"w": [{"prompt": [1] * n, "out": 2} for n in (1, 2, 3, 4)]}))

    assert main(["bench", "serve", "--base-url", base_url, "--workload", str(workload), "--output-json", str(path)]) == 0

    result = json.loads(path.read_text())
    assert (result["completed"], result["failed"]) == (2, 2)
    assert result["total_input_tokens"] == 5
    assert any("two tokens are too few" in error for error in result["errors"])
    assert any("[DONE]" in error for error in result["errors"])


def test_a_server_that_refuses_the_first_request_is_one_line(base_url: str, capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "serve", "--base-url", base_url, "--input-len", "2", "--num-prompts", "1"]) == 1
    assert "two tokens are too few" in capsys.readouterr().err


def test_no_server_is_one_line(capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "serve", "--base-url", "http://127.0.0.1:9"]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "jaxllm serve" in err


@pytest.mark.parametrize(
    "argv",
    [
        ["--request-rate", "0"],
        ["--max-concurrency", "0"],
    ],
)
def test_impossible_loads_are_refused(argv: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "serve", *argv]) == 2
    assert argv[0] in capsys.readouterr().err


def test_requests_arrive_at_the_asked_rate(base_url: str, tmp_path: Path):
    path = tmp_path / "out.json"
    argv = ["bench", "serve", "--base-url", base_url, "--num-prompts", "20", "--input-len", "5", "--output-len", "1"]

    assert main([*argv, "--request-rate", "100", "--output-json", str(path)]) == 0

    result = json.loads(path.read_text())
    assert result["duration"] > 0.05, "20 requests at 100 a second take about 0.2 s"
    assert result["completed"] == 20


def test_metrics_of_known_times():
    first = Outcome(10, started=0.0, finished=3.0, chunk_times=[1.0, 2.0, 3.0], num_output_tokens=3)
    second = Outcome(20, started=2.0, finished=4.0, chunk_times=[4.0], num_output_tokens=1)
    failed = Outcome(99, started=0.0, finished=9.0, error="no")

    found = serving_metrics([first, second, failed], 4.0)

    assert (found["completed"], found["failed"]) == (2, 1)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (30, 4)
    assert found["output_throughput"] == 1.0
    assert found["max_concurrent_requests"] == 2
    assert found["mean_ttft_ms"] == pytest.approx(1500)
    assert found["mean_tpot_ms"] == pytest.approx(1000)
    assert found["mean_itl_ms"] == pytest.approx(1000)
    assert found["median_e2el_ms"] == pytest.approx(2500)


def test_metrics_of_nothing_are_nan_not_an_error():
    found = serving_metrics([Outcome(1, error="no")], 1.0)

    assert found["completed"] == 0
    assert math.isnan(found["mean_ttft_ms"])
