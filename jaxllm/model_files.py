"""What was found of a model on disk: the one description that tokenizer, generation defaults and weight loading start from. No jax here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jaxllm.errors import ModelLoadError


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """A resolved model.

    Args:
        kind: "hf" for a directory in the Hugging Face layout, "gguf" for one GGUF file.
        path: that directory or file.
        config: the Hugging Face config of the model (for GGUF derived from its metadata), `hf_overrides` applied.
        generation_config: the model's own generation defaults, eos_token_id among them; {} where it has none.
        name: what the model is called where the user gave no name: the hub id, the path as given, or the default model's name.
        tokenizer_path: directory or GGUF file of the tokenizer; `path` unless the user named another.
        gguf_metadata: metadata of the GGUF file at `tokenizer_path`, else None.
        chat_template: the template that the user gave (a file's text or the text itself); None uses the tokenizer's.
    """

    kind: Literal["hf", "gguf"]
    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    name: str
    tokenizer_path: Path
    gguf_metadata: Mapping[str, Any] | None = field(default=None, repr=False)
    chat_template: str | None = None

    @property
    def eos_token_ids(self) -> list[int]:
        """Every id that generation_config and config name as end of sequence; the tokenizer may know one more."""
        text_config = self.config.get("text_config") or {}
        ids: list[int] = []
        for source in (self.generation_config, self.config, text_config):
            value = source.get("eos_token_id")
            ids += [value] if isinstance(value, int) else list(value or ())
        return list(dict.fromkeys(ids))


def read_json(path: Path, kind: type = dict) -> Any:
    """The object (or what `kind` is) in a JSON file, or None where there is none. Raises ModelLoadError where it holds something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, kind):
        raise ModelLoadError(f"{path} must hold a JSON {'object' if kind is dict else kind.__name__}, got {type(value).__name__}")
    return value


def overridden(config: Mapping[str, Any], overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    """`overrides` laid over `config`; objects are merged, everything else is replaced."""
    merged = dict(config)
    for key, value in (overrides or {}).items():
        old = merged.get(key)
        merged[key] = overridden(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged
