"""The README's examples run as they are written."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from jaxllm.cli.bench.startup import free_port, stopped_at_the_end

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
START_TIMEOUT_S = 300
# Without what this suite sets.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}


def blocks(language: str) -> list[str]:
    """The README's code blocks of a language, in order."""
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_TIMEOUT_S, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("target", re.findall(r"\]\(((?!http)[^)]+)\)", README))
def test_links_lead_somewhere(target: str):
    assert (ROOT / target).exists()


@pytest.mark.heavy
@pytest.mark.default_model
def test_the_batch_example_runs():
    [batch] = [block for block in blocks("python") if "LLM()" in block]

    out = run([sys.executable, "-c", batch])

    assert "'The capital of France is' ->" in out
    assert "'Water boils at' ->" in out


@pytest.fixture(scope="module")
def base_url() -> Iterator[str]:
    """A server of the default model."""
    url = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "jaxllm.cli.main", "serve", "--host=127.0.0.1", f"--port={httpx.URL(url).port}"]
    process = subprocess.Popen(command, env=ENVIRONMENT)
    with stopped_at_the_end(process), httpx.Client(trust_env=False) as client:
        for _ in range(10 * START_TIMEOUT_S):
            assert process.poll() is None, "the server ended"
            with contextlib.suppress(httpx.TransportError):
                if client.get(url + "/ready").status_code == httpx.codes.OK:
                    break
            time.sleep(0.1)
        yield url


@pytest.mark.heavy
@pytest.mark.default_model
def test_the_client_examples_run(base_url: str):
    [client] = [block for block in blocks("python") if "OpenAI" in block]
    [curl] = [block for block in blocks("sh") if block.startswith("curl")]
    [chat] = [line for line in "".join(blocks("sh")).splitlines() if line.startswith("jaxllm chat -q")]

    assert run([sys.executable, "-c", client.replace("http://localhost:8000", base_url)]).strip()
    assert "Paris" in run(["/bin/sh", "-c", curl.replace("http://localhost:8000", base_url)])
    jaxllm = f"{sys.executable} -m jaxllm.cli.main chat --url {base_url}/v1"
    assert "Paris" in run(["/bin/sh", "-c", chat.replace("jaxllm chat", jaxllm)])
