"""Options and fixtures that every test may use."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--conformance", metavar="DIR", help="folder of public conformance data; tests that read it are skipped without")


@pytest.fixture(scope="session")
def conformance_data(request: pytest.FixtureRequest) -> Path:
    """The folder given with --conformance; the test is skipped without one."""
    given = request.config.getoption("--conformance")
    if given is None:
        pytest.skip("needs --conformance DIR")
    folder = Path(given)
    if not folder.is_dir():
        pytest.fail(f"--conformance {folder} is not a folder")
    return folder


@pytest.fixture(scope="session")
def default_model_file() -> Path:
    """The default model's GGUF file, fetched where it is not in the cache; the test is skipped where that cannot be done."""
    from jaxllm.errors import ModelLoadError
    from jaxllm.weights.default_model import default_model_path

    try:
        return default_model_path()
    except ModelLoadError as error:
        pytest.skip(str(error))
