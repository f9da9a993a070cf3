"""What sentence-transformers' files beside a model say: what becomes of its hidden states, and how long inputs are. No jax here."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxllm.errors import ModelLoadError
from jaxllm.model_files import read_json
from jaxllm.specs import DenseSpec, PoolingKind
from jaxllm.weights.checkpoint import Checkpoint
from jaxllm.weights.hf import open_checkpoint

logger = logging.getLogger(__name__)

# By their names without "_token" or "_tokens", in the order in which several are concatenated.
_MODES: dict[str, PoolingKind] = {
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len": "mean_sqrt_len",
    "weightedmean": "weighted_mean",
    "last": "last",
}
# Where modules read and write, and how, where their settings do not say.
_AS_USUAL = {"module_input_name": "sentence_embedding", "module_output_name": "sentence_embedding", "use_residual": False}
_ACTIVATIONS: dict[str, Any] = {"Identity": None, "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu", "Sigmoid": "sigmoid"}


@dataclass(frozen=True)
class SentenceModules:
    """What modules.json and its companions say. `dense` has each layer with the folder of its weights."""

    kinds: tuple[PoolingKind, ...]
    dense: tuple[tuple[DenseSpec, str], ...]
    normalize: bool
    max_length: int | None
    lower_case: bool


def read_modules(directory: Path) -> SentenceModules | None:
    """The modules of a directory; None where it has no modules.json with a pooling: cross-encoders are read by their architecture.

    Raises:
        ModelLoadError: a module or a setting that is not supported.
    """
    listing = directory / "modules.json"
    if not listing.is_file():
        return None
    modules = read_json(listing, list) or []
    kinds: tuple[PoolingKind, ...] = ()
    dense: list[tuple[DenseSpec, str]] = []
    names = []
    for module in modules:
        kind, path = str(module.get("type", "")).rsplit(".", 1)[-1], str(module.get("path", ""))
        settings = read_json(directory / path / "config.json") or {} if path else {}
        if kind == "Pooling":
            kinds = _pooling_kinds(settings, listing)
        elif kind == "Dense":
            dense.append((_dense(settings, listing), path))
        elif kind not in ("Transformer", "Dropout", "Normalize", "LogitScore") or (kind == "Transformer" and path):
            raise ModelLoadError(f"{listing}: module {module.get('type')!r} at {path!r} is not supported")
        if kind in ("Dense", "Normalize") and any(settings.get(key) not in (None, value) for key, value in _AS_USUAL.items()):
            raise ModelLoadError(f"{listing}: {kind} with {settings} is not supported; supported: {_AS_USUAL}")
        names += [kind] if kind != "Dropout" else []
    if not kinds:
        return None
    if not re.fullmatch("Transformer Pooling( Dense)*( Normalize)?", " ".join(names)):
        raise ModelLoadError(f"{listing}: modules in the order {', '.join(names)}; supported: Transformer, Pooling, Dense, Normalize")
    if prompt := (read_json(directory / "config_sentence_transformers.json") or {}).get("default_prompt_name"):
        logger.warning("sentence-transformers puts the prompt %r before texts by default; it is not added here: send it with them", prompt)
    # Named after the kind of encoder; newer releases leave the length to the tokenizer.
    sentence = read_json(next(iter(sorted(directory.glob("sentence_*_config.json"))), directory / "sentence_bert_config.json")) or {}
    length = sentence.get("max_seq_length") or (read_json(directory / "tokenizer_config.json") or {}).get("model_max_length")
    return SentenceModules(kinds, tuple(dense), "Normalize" in names, length, bool(sentence.get("do_lower_case")))


def _pooling_kinds(settings: Mapping[str, Any], listing: Path) -> tuple[PoolingKind, ...]:
    if settings.get("include_prompt") is False:
        raise ModelLoadError(f"{listing}: a pooling that leaves out the prompt (include_prompt=false) is not supported")
    named = settings.get("pooling_mode")
    on = [key.removeprefix("pooling_mode_") for key, value in settings.items() if key.startswith("pooling_mode_") and value]
    given = [named] if isinstance(named, str) else named or on
    names = [re.sub("_?tokens?$", "", name) for name in given]
    if not set(names) <= set(_MODES):
        raise ModelLoadError(f"{listing}: pooling modes {', '.join(given)} are not all supported; supported: {', '.join(_MODES)}")
    if named is not None:
        return tuple(_MODES[name] for name in names)
    return tuple(kind for name, kind in _MODES.items() if name in names) or ("mean",)


def _dense(settings: Mapping[str, Any], listing: Path) -> DenseSpec:
    name = str(settings.get("activation_function", "torch.nn.modules.activation.Tanh")).rsplit(".", 1)[-1]
    if name not in _ACTIVATIONS or not isinstance(settings.get("out_features"), int):
        raise ModelLoadError(f"{listing}: a dense layer with {dict(settings)} is not supported; activations: {', '.join(_ACTIVATIONS)}")
    return DenseSpec(settings["out_features"], bool(settings.get("bias", True)), _ACTIVATIONS[name])


def with_dense_layers(main: Checkpoint, directory: Path, folders: Iterable[str]) -> Checkpoint:
    """A checkpoint with those of its dense layers, whose names begin with the folder."""
    tensors = dict(main.tensors)
    for folder in folders:
        tensors |= {f"{folder}.{name}": tensor for name, tensor in open_checkpoint(directory / folder).tensors.items()}
    return Checkpoint(main.location, tensors)
