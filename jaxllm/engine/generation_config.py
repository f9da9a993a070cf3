"""Sampling defaults and end-of-sequence ids, from the model's generation config and the user's override of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxllm.errors import ConfigError, InvalidRequestError
from jaxllm.sampling_params import SamplingParams

# Names in a generation config -> field of SamplingParams. Other names of a model's file concern other engines and are not defaults.
_SAMPLING_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
# An override is written for us, so it may also use our own names; anything else in it is a mistake.
_OVERRIDE_NAMES = _SAMPLING_NAMES | {
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "max_tokens": "max_tokens",
}
_EOS = "eos_token_id"


@dataclass(frozen=True)
class GenerationDefaults:
    """`sampling`: SamplingParams fields for requests that do not set them. `eos_token_ids`: every id that ends a sequence."""

    sampling: dict[str, Any]
    eos_token_ids: list[int]


def generation_defaults(
    source: str,
    override: Mapping[str, Any] | None,
    *,
    model_generation_config: Mapping[str, Any],
    model_config: Mapping[str, Any],
    tokenizer_eos_id: int | None,
) -> GenerationDefaults:
    """Resolve the defaults as `--generation-config source` and `--override-generation-config override` say.

    `source` is "auto" (the model's own file), "vllm" (neutral sampling defaults; the model's end-of-sequence ids still hold) or a
    directory holding a generation_config.json.

    Raises:
        ConfigError: no such directory, an unknown name in the override, or a default out of its range.
    """
    file = dict(model_generation_config)
    if source not in ("auto", "vllm"):
        file = _read(Path(source))
    sampling = {} if source == "vllm" else _pick(file, _SAMPLING_NAMES)
    override = dict(override or {})
    eos: Any = override.pop(_EOS, None)
    unknown = sorted(set(override) - set(_OVERRIDE_NAMES))
    if unknown:
        known = ", ".join([*_OVERRIDE_NAMES, _EOS])
        raise ConfigError(f"override_generation_config holds {', '.join(map(repr, unknown))}; it may hold {known}")
    sampling |= _pick(override, _OVERRIDE_NAMES)
    try:
        SamplingParams(**sampling)
    except InvalidRequestError as error:
        raise ConfigError(
            f"sampling default out of range: {error}; set it with override_generation_config, or use generation_config='vllm'"
        ) from error
    if eos is None:
        eos = _first_set(file.get(_EOS), model_config.get(_EOS), (model_config.get("text_config") or {}).get(_EOS))
    ids = [*_ids(eos), *_ids(tokenizer_eos_id)]
    return GenerationDefaults(sampling, list(dict.fromkeys(ids)))


def _read(directory: Path) -> dict[str, Any]:
    path = directory / "generation_config.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"generation_config={str(directory)!r}: cannot read {path} ({error.strerror}); use auto, vllm or a directory"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None


def _pick(config: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {field: config[name] for name, field in names.items() if config.get(name) is not None}


def _first_set(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _ids(value: Any) -> Iterable[int]:
    ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
    for item in ids:
        if isinstance(item, bool) or not isinstance(item, int) or item < 0:
            raise ConfigError(f"eos_token_id must be a token id or a list of them, got {value!r}")
    return ids
