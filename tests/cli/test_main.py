"""The `jaxllm` command: what it imports, and its exit statuses."""

from __future__ import annotations

import subprocess
import sys

import pytest

from jaxllm.cli.bench.main import BENCHMARKS
from jaxllm.cli.main import COMMANDS, main, run_command
from jaxllm.errors import ConfigError, ModelLoadError

HEAVY = ("jax", "jaxlib", "transformers", "fastapi", "uvicorn", "numpy", "pydantic", "httpx", "yaml")


def imported_by(code: str) -> set[str]:
    """The heavy packages that a fresh interpreter has loaded after running `code`."""
    probe = f"import sys\ntry:\n    {code}\nexcept SystemExit:\n    pass\nprint('loaded', *[m for m in {HEAVY!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True).stdout
    return set(out.splitlines()[-1].split()[1:])


@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        ["--version"],
        *([command, "--help"] for command in COMMANDS),
        *(["bench", benchmark, "--help"] for benchmark in BENCHMARKS),
        ["serve", "--help=all"],
        ["serve", "--nonsense"],
    ],
)
def test_help_and_mistakes_import_nothing_heavy(argv: list[str]):
    assert imported_by(f"from jaxllm.cli.main import main; main({argv!r})") == set()


@pytest.mark.parametrize("code", ["import jaxllm", "from jaxllm import SamplingParams, EngineConfig"])
def test_importing_jaxllm_imports_nothing_heavy(code: str):
    assert imported_by(code) == set()


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(command in out for command in COMMANDS)


def test_no_command_is_a_usage_error_with_the_help(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 2
    assert "usage: jaxllm" in capsys.readouterr().out


def test_an_unknown_command_offers_the_nearest(capsys: pytest.CaptureFixture[str]):
    assert main(["sevre"]) == 2
    assert "did you mean 'serve'?" in capsys.readouterr().err


def test_a_wrong_flag_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]):
    assert main(["serve", "--max-modl-len", "5"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err.startswith("jaxllm serve: error: unknown flag --max-modl-len")


def test_a_value_that_the_config_refuses_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]):
    assert main(["serve", "--block-size", "17"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "power of two" in err


@pytest.mark.parametrize(("error", "status"), [(ConfigError("x"), 2), (ModelLoadError("x"), 1), (KeyboardInterrupt(), 130)])
def test_errors_on_purpose_become_exit_statuses(error: BaseException, status: int):
    def command(argv: object) -> int:
        raise error

    assert run_command("jaxllm x", command, []) == status


def test_other_errors_keep_their_traceback():
    def command(argv: object) -> int:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_command("jaxllm x", command, [])
