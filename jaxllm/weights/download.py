"""From what the user calls a model to files on disk: a directory, a hub id, a GGUF file, or nothing for the default model. No jax here."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError, ModelLoadError
from jaxllm.model_files import ModelFiles, overridden, read_json
from jaxllm.weights import default_model
from jaxllm.weights.gguf_config import config_from_gguf, generation_config_from_gguf
from jaxllm.weights.gguf_file import read_gguf

_CONFIG_PATTERNS = ["*.json", "*.jinja", "*.txt", "tokenizer.model", "additional_chat_templates/*.jinja"]
_WEIGHT_PATTERNS = ["*.safetensors"]


def resolve_model(config: ModelConfig) -> ModelFiles:
    """Find (and fetch, where needed) the files of the model that `config` names.

    Raises:
        ModelLoadError: it cannot be found, fetched or read; the message says what would work.
        ConfigError: an option that does not fit what was found.
    """
    path, name = _locate(config)
    metadata = None
    if path.suffix == ".gguf":
        if config.load_format == "safetensors":
            raise ConfigError(f"load_format='safetensors' does not fit the GGUF file {path}; leave it at auto")
        file = read_gguf(path)
        metadata, hf_config, defaults = file.metadata, config_from_gguf(file), generation_config_from_gguf(file.metadata)
    else:
        if config.load_format == "gguf":
            raise ConfigError(f"load_format='gguf' needs a .gguf file or a directory that holds exactly one, got {path}")
        hf_config, defaults = read_json(path / "config.json"), read_json(path / "generation_config.json") or {}
        if hf_config is None:
            raise ModelLoadError(f"{path} holds neither config.json nor a .gguf file, so it is no model that can be loaded")
    tokenizer_path, tokenizer_metadata = _tokenizer(config, path, metadata)
    return ModelFiles(
        kind="hf" if metadata is None else "gguf",
        path=path,
        config=overridden(hf_config, config.hf_overrides),
        generation_config=_generation_config(config, defaults),
        name=name,
        tokenizer_path=tokenizer_path,
        gguf_metadata=tokenizer_metadata,
        chat_template=_chat_template(config.chat_template),
    )


def _locate(config: ModelConfig) -> tuple[Path, str]:
    """The directory or GGUF file, and the model's name."""
    if config.model is None:
        return default_model.default_model_path(), default_model.NAME
    path = Path(config.model).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelLoadError(
                f"model={config.model!r} is a file and not a .gguf one; give the directory that holds config.json, or a .gguf file"
            )
        return path, config.model
    if path.is_dir():
        return _sole_gguf(path) or path, config.model
    with_weights = config.load_format != "dummy"
    return _from_hub(config.model, config.revision, "model", with_weights), config.model


def _sole_gguf(folder: Path) -> Path | None:
    """The GGUF file (of a split one, the first part) of a directory that holds no Hugging Face checkpoint."""
    if (folder / "config.json").exists():
        return None
    files = [file for file in sorted(folder.glob("*.gguf")) if not re.search(r"-(?!00001)\d{5}-of-\d{5}$", file.stem)]
    if len(files) > 1:
        raise ModelLoadError(f"{folder} holds {len(files)} GGUF files; name one of them: {', '.join(f.name for f in files)}")
    return files[0] if files else None


def _from_hub(model: str, revision: str | None, option: str, with_weights: bool) -> Path:
    """A snapshot of the hub repository `owner/name`, or the one file of `owner/name/file.gguf`, in huggingface_hub's cache."""
    parts = model.split("/")
    looks_like_a_path = model.startswith(("/", ".", "~")) or not 1 <= len(parts) <= 2
    one_file = len(parts) >= 3 and model.endswith(".gguf") and not model.startswith(("/", ".", "~"))
    if looks_like_a_path and not one_file:
        raise ModelLoadError(
            f"{option}={model!r}: no such file or directory; give an existing one, a hub id (owner/name), or nothing for the default model"
        )
    import httpx
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        if one_file:
            return Path(hf_hub_download("/".join(parts[:2]), "/".join(parts[2:]), revision=revision))
        patterns = _CONFIG_PATTERNS + (_WEIGHT_PATTERNS if with_weights else [])
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except (OfflineModeIsEnabled, LocalEntryNotFoundError) as error:
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON") else ""
        raise ModelLoadError(
            f"{option}={model!r} is no local directory, not in the hub cache, and the hub cannot be reached{offline}; "
            "give a local directory or .gguf file"
        ) from error
    except (HfHubHTTPError, HFValidationError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelLoadError(f"{option}={model!r} is no local directory and the hub does not give it: {reason}") from error
    except (OSError, httpx.HTTPError) as error:
        raise ModelLoadError(f"{option}={model!r} is no local directory and cannot be fetched from the hub: {error}") from error


def _tokenizer(config: ModelConfig, path: Path, metadata: Any) -> tuple[Path, Any]:
    """Path of the tokenizer, and its GGUF metadata where it is a GGUF file."""
    if config.tokenizer is None:
        return path, metadata
    own = Path(config.tokenizer).expanduser()
    if not own.exists():
        own = _from_hub(config.tokenizer, None, "tokenizer", with_weights=False)
    return own, read_gguf(own).metadata if own.suffix == ".gguf" else None


def _generation_config(config: ModelConfig, own: dict[str, Any]) -> dict[str, Any]:
    """The model's own generation config, or that of the directory which the user named. "vllm" turns off sampling defaults, not the
    model's end-of-sequence ids, so the file is still read."""
    if config.generation_config in ("auto", "vllm"):
        return own
    folder = Path(config.generation_config).expanduser()
    found = read_json(folder if folder.is_file() else folder / "generation_config.json")
    if found is None:
        raise ConfigError(
            f"generation_config={config.generation_config!r}: no generation_config.json there; auto, vllm or such a directory work"
        )
    return found


def _chat_template(given: str | None) -> str | None:
    """The text of the template that the user gave as a file or as the text itself."""
    if given is None or any(mark in given for mark in ("{{", "{%", "{#", "\n")):
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"chat_template={given!r} is neither a template (it holds no {{{{ or {{%) nor a readable file: {error}"
        ) from error
