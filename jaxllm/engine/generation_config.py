"""Sampling defaults and end-of-sequence ids, from the model's generation config and the user's override of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxllm.errors import ConfigError, InvalidRequestError
from jaxllm.sampling_params import SamplingParams

# Names in a generation config that are sampling parameters. Other names of a model's file concern other engines and are not defaults.
_SAMPLING_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
# An override is written for us, so it may also use our own names; anything else in it is a mistake.
_OVERRIDE_NAMES = (*_SAMPLING_NAMES, "presence_penalty", "frequency_penalty", "max_tokens")
_EOS = "eos_token_id"


@dataclass(frozen=True)
class GenerationDefaults:
    """`sampling`: SamplingParams fields for requests that do not set them. `eos_token_ids`: every id that ends a sequence."""

    sampling: dict[str, Any]
    eos_token_ids: list[int]


def generation_defaults(
    source: str, override: Mapping[str, Any] | None, *, generation_config: Mapping[str, Any], eos_token_ids: Iterable[int | None]
) -> GenerationDefaults:
    """Resolve the defaults as `--generation-config source` and `--override-generation-config override` say.

    `source` "vllm" means neutral sampling defaults (the end-of-sequence ids still hold); otherwise `generation_config` is the file's
    content. `eos_token_ids` are those that model and tokenizer name, unless the override names others.

    Raises:
        ConfigError: an unknown name in the override, or a default out of its range.
    """
    sampling = {} if source == "vllm" else _pick(generation_config, _SAMPLING_NAMES)
    override = dict(override or {})
    if override.get(_EOS) is not None:
        eos_token_ids = _ids(override[_EOS])
    override.pop(_EOS, None)
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
    return GenerationDefaults(sampling, list(dict.fromkeys(token for token in eos_token_ids if token is not None)))


def _pick(config: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name.replace("max_new", "max"): config[name] for name in names if config.get(name) is not None}


def _ids(value: Any) -> list[int]:
    ids = list(value) if isinstance(value, list | tuple) else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in ids):
        raise ConfigError(f"override_generation_config: eos_token_id must be a token id or a list of them, got {value!r}")
    return ids
