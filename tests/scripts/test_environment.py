"""The shell scripts: which Python they take, what they say, and what a second run does. A stand-in Python keeps it quick."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"

# Answers what scripts/environment.sh asks, makes an "environment" whose pip and jaxllm only leave a trace.
STAND_IN = """#!/bin/sh
version=${VERSION_FILE:+$(cat "$VERSION_FILE")}
version=${version:-3.11.9}
case "$*" in
    *base_prefix*) case $version in 3.11.*|3.12.*) [ -z "${NO_ENSUREPIP:-}" ] && echo "/stand-in $version" ;; *) exit 3 ;; esac ;;
    *version_info*) echo "$version" ;;
    "-m venv "*)
        echo venv >> "$TRACE"
        mkdir -p "$3/bin"
        cp "$0" "$3/bin/python"
        printf '#!/bin/sh\\necho "jaxllm $*"\\n' > "$3/bin/jaxllm"
        chmod +x "$3/bin/jaxllm" ;;
    *"pip --version"*) ;;
    *"pip install"*) echo "install ${*##*/}" >> "$TRACE"; [ -z "${PIP_FAILS:-}" ] ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with a space in its path, holding the scripts and a pyproject.toml."""
    root = tmp_path / "a checkout"
    shutil.copytree(SCRIPTS, root / "scripts")
    (root / "pyproject.toml").write_text("[project]\n")
    python = root / "stand-in-python"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    return root


def run(checkout: Path, *argv: str, path: str | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run scripts/serve.sh from another directory."""
    environment = {**os.environ, "TRACE": str(checkout / "trace"), "PYTHON": str(checkout / "stand-in-python"), **variables}
    if path is not None:
        environment["PATH"] = path
        del environment["PYTHON"]
    serve = ["/bin/sh", str(checkout / "scripts" / "serve.sh"), *argv]
    return subprocess.run(serve, cwd="/", env=environment, capture_output=True, text=True, timeout=60)


def trace(checkout: Path) -> list[str]:
    """What the stand-in did since the last call."""
    path = checkout / "trace"
    lines = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return [line.split("/")[-1] for line in lines]


def test_the_first_run_sets_up_and_later_runs_go_straight_to_the_server(checkout: Path):
    first = run(checkout, "--port", "1", "a b")
    assert first.returncode == 0, first.stderr
    assert first.stdout == "jaxllm serve --port 1 a b\n"
    assert [line.split()[0] for line in trace(checkout)] == ["venv", "install"]

    second = run(checkout)

    assert second.stdout == "jaxllm serve\n"
    assert trace(checkout) == []
    assert second.stderr == ""


@pytest.mark.parametrize(
    ("answer", "installed"),
    [
        ("echo 580.95.05; echo 580.95.05", "[cuda13]"),
        ("echo 535.104.12", "[cuda12]"),
        ("echo NVIDIA-SMI has failed; exit 9", None),
    ],
)
def test_the_driver_of_a_gpu_chooses_the_build_of_jax(checkout: Path, tmp_path: Path, answer: str, installed: str | None):
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "nvidia-smi").write_text(f"#!/bin/sh\n{answer}\n")
    (tools / "nvidia-smi").chmod(0o755)

    result = run(checkout, PATH=f"{tools}:{os.environ['PATH']}")

    assert result.returncode == 0, result.stderr
    assert ("[cuda" in trace(checkout)[-1]) == (installed is not None)
    assert installed is None or installed in result.stderr


@pytest.mark.parametrize("change", ["pyproject", "python", "stamp"])
def test_what_the_environment_was_made_from_changes_and_it_is_made_again(checkout: Path, change: str):
    version = checkout / "version"
    version.write_text("3.11.9")
    run(checkout, VERSION_FILE=str(version))
    trace(checkout)

    if change == "pyproject":
        (checkout / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    elif change == "python":
        version.write_text("3.12.1")
    else:
        for stamp in (checkout / ".venv").glob("*.stamp"):
            stamp.unlink()
    result = run(checkout, VERSION_FILE=str(version))

    assert result.returncode == 0, result.stderr
    assert [line.split()[0] for line in trace(checkout)] == ["venv", "install"]


def test_a_failed_installation_is_tried_again(checkout: Path):
    failed = run(checkout, PIP_FAILS="1")
    assert failed.returncode == 1
    assert "installing failed" in failed.stderr
    trace(checkout)

    assert run(checkout).returncode == 0
    assert [line.split()[0] for line in trace(checkout)] == ["venv", "install"]


def test_an_old_python_is_one_clear_line(checkout: Path):
    version = checkout / "version"
    version.write_text("3.9.18")

    result = run(checkout, VERSION_FILE=str(version))

    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1
    assert "needs Python 3.11 or newer" in result.stderr
    assert "is 3.9.18" in result.stderr


def test_a_python_without_venv_says_which_package_is_missing(checkout: Path):
    result = run(checkout, NO_ENSUREPIP="1")

    assert len(result.stderr.splitlines()) == 1
    assert "python3-venv" in result.stderr


def test_a_named_python_that_does_not_exist_is_one_clear_line(checkout: Path):
    result = run(checkout, PYTHON="/nowhere/python3")

    assert result.returncode == 1
    assert result.stderr.splitlines() == ["jaxllm: PYTHON=/nowhere/python3 cannot be run; name a Python of 3.11 or newer, or unset it"]


def test_no_python_at_all_is_one_clear_line(checkout: Path, tmp_path: Path):
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("dirname", "cat", "cksum", "cut", "grep", "head", "rm"):
        (tools / tool).symlink_to(shutil.which(tool) or f"/bin/{tool}")

    result = run(checkout, path=str(tools))

    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1
    assert "found none" in result.stderr


@pytest.mark.parametrize("script", ["scripts/environment.sh", "scripts/serve.sh", "scripts/test.sh", ".ci/run"])
def test_scripts_are_valid_shell(script: str):
    subprocess.run(["/bin/sh", "-n", str(SCRIPTS.parent / script)], check=True)


@pytest.mark.parametrize("script", ["scripts/serve.sh", "scripts/test.sh", ".ci/run"])
def test_scripts_may_be_executed(script: str):
    assert os.access(SCRIPTS.parent / script, os.X_OK)
