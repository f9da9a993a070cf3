"""From what the user calls a model to its files."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError, ModelLoadError
from jaxllm.weights import default_model
from jaxllm.weights.download import resolve_model
from tests.weights.gguf_files import write_gguf


def resolve(model, **options):
    return resolve_model(ModelConfig(model=None if model is None else str(model), **options))


@pytest.fixture
def directory(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"model_type": "llama", "eos_token_id": 5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "eos_token_id": [5, 7]}))
    return folder


def test_a_directory_brings_its_configs(directory):
    files = resolve(directory)

    assert (files.kind, files.path, files.tokenizer_path, files.name) == ("hf", directory, directory, str(directory))
    assert files.config["model_type"] == "llama"
    assert files.generation_config["temperature"] == 0.6
    assert files.eos_token_ids == [5, 7]


def test_a_gguf_file_brings_configs_and_tokenizer(tmp_path):
    path = write_gguf(tmp_path / "m.gguf")
    files = resolve(path)

    assert (files.kind, files.path) == ("gguf", path)
    assert files.config["architectures"] == ["LlamaForCausalLM"]
    assert files.eos_token_ids == [0]
    assert files.gguf_metadata["tokenizer.ggml.model"] == "gpt2"


def test_a_directory_with_one_gguf_file_is_that_file(tmp_path):
    path = write_gguf(tmp_path / "m.gguf")
    assert resolve(tmp_path).path == path

    write_gguf(tmp_path / "n.gguf")
    with pytest.raises(ModelLoadError, match=r"2 GGUF files; name one of them: m\.gguf, n\.gguf"):
        resolve(tmp_path)


def test_nothing_is_the_default_model(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "m.gguf")
    monkeypatch.setattr(default_model, "default_model_path", lambda: path)
    files = resolve(None)

    assert (files.path, files.name) == (path, "SmolLM2-135M-Instruct")


def test_overrides_are_laid_over_the_config(directory):
    files = resolve(directory, hf_overrides={"rope_scaling": {"factor": 4.0}, "eos_token_id": 9})

    assert files.config["rope_scaling"] == {"type": "linear", "factor": 4.0}
    assert files.eos_token_ids == [5, 7, 9]


def test_the_tokenizer_may_come_from_elsewhere(directory, tmp_path):
    path = write_gguf(tmp_path / "m.gguf")

    files = resolve(directory, tokenizer=str(path))
    assert (files.tokenizer_path, files.gguf_metadata["tokenizer.ggml.model"]) == (path, "gpt2")
    files = resolve(path, tokenizer=str(directory))
    assert (files.tokenizer_path, files.gguf_metadata) == (directory, None)


def test_the_generation_config_may_come_from_elsewhere(directory, tmp_path):
    (tmp_path / "generation_config.json").write_text('{"top_k": 3}')

    assert resolve(directory, generation_config=str(tmp_path)).generation_config == {"top_k": 3}
    with pytest.raises(ConfigError, match="no generation_config"):
        resolve(directory, generation_config=str(tmp_path / "none"))


def test_a_chat_template_is_a_file_or_the_text(directory, tmp_path):
    (tmp_path / "t.jinja").write_text("{{ messages }}")

    assert resolve(directory, chat_template=str(tmp_path / "t.jinja")).chat_template == "{{ messages }}"
    assert resolve(directory, chat_template="{{ bos_token }}").chat_template == "{{ bos_token }}"
    with pytest.raises(ConfigError, match="neither a template"):
        resolve(directory, chat_template=str(tmp_path / "none.jinja"))


@pytest.mark.parametrize("name", ["./missing", "/missing/model", "~/missing", "a/b/c"])
def test_a_path_that_is_not_there_is_said_to_be_missing(name):
    with pytest.raises(ModelLoadError, match="no such file or directory"):
        resolve(name)


@pytest.mark.parametrize("name", ["owner/name", "owner/name/file.gguf"])
def test_a_hub_id_offline_is_one_clear_line(name, tmp_path):
    code = (
        "from jaxllm.config import ModelConfig\nfrom jaxllm.errors import ModelLoadError\n"
        "from jaxllm.weights.download import resolve_model\n"
        f"try: resolve_model(ModelConfig(model={name!r}))\n"
        "except ModelLoadError as error: print(error)"
    )
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}

    output = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout.strip()

    assert output.startswith(f"model={name!r} is no local directory, not in the hub cache, and the hub cannot be reached (HF_HUB_OFFLINE")
    assert "\n" not in output


def test_a_hub_id_in_the_hub_cache_works_offline(tmp_path):
    repository = tmp_path / "hub" / "models--owner--name"
    snapshot = repository / "snapshots" / "0123456789012345678901234567890123456789"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"model_type": "llama"}')
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(snapshot.name)
    code = (
        "from jaxllm.config import ModelConfig; from jaxllm.weights.download import resolve_model;"
        "files = resolve_model(ModelConfig(model='owner/name')); print(files.name, files.path)"
    )
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}

    output = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout.strip()

    assert output == f"owner/name {snapshot}"


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(ModelLoadError, match=r"neither config\.json nor a \.gguf file"):
        resolve(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelLoadError, match="must hold a JSON object"):
        resolve(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="cannot be read as JSON"):
        resolve(tmp_path)
    with pytest.raises(ModelLoadError, match=r"not a \.gguf one"):
        resolve(tmp_path / "config.json")


def test_a_load_format_that_does_not_fit_is_refused(directory, tmp_path):
    path = write_gguf(tmp_path / "m.gguf")

    with pytest.raises(ConfigError, match="does not fit the GGUF file"):
        resolve(path, load_format="safetensors")
    with pytest.raises(ConfigError, match=r"needs a \.gguf file"):
        resolve(directory, load_format="gguf")


def test_resolving_imports_no_jax(tmp_path):
    path = write_gguf(tmp_path / "m.gguf")
    code = (
        "import sys; from jaxllm.config import ModelConfig; from jaxllm.weights.download import resolve_model;"
        f"resolve_model(ModelConfig(model={str(path)!r}));"
        "print(sorted({'transformers', 'jax', 'torch', 'numpy', 'gguf', 'huggingface_hub'} & sys.modules.keys()))"
    )

    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
