"""Rotary frequencies out of Hugging Face configs: every scaling, in every spelling.

Arithmetic is in float32 and in the order of the reference implementations, so that frequencies are equal to the last bits.

Two scalings depend on the length of the sequence in their reference: `dynamic` stretches the base with it, `longrope` changes its
factors past the original context. Cached keys keep the rotation they were written with, so one choice must hold for an engine's life,
whatever its requests: it is made by `max_model_len`, the longest sequence that the engine admits. An engine whose sequences stay within
the original context computes exactly what the reference does; a longer one uses for all sequences what the reference uses for one of
`max_model_len` tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxllm.errors import ModelLoadError
from jaxllm.models.hf_config import HFConfig
from jaxllm.specs import RopeSpec

_ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True)
class RopeParameters:
    """One layer type's rope entry of a config, spelling resolved."""

    kind: str
    theta: float
    values: Mapping[str, Any]
    # Positions that the config gives the model, and those of its pretraining.
    max_positions: int
    original_positions: int
    # The part of each head that is rotated.
    partial: float = 1.0

    def number(self, key: str) -> float:
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelLoadError(f"config.json: rope type {self.kind!r} needs a number for {key!r}, got {value!r}")
        return float(value)

    def context_length(self) -> int:
        """Positions that the scaling is made for."""
        if self.kind == "linear" or (self.kind == "dynamic" and "alpha" not in self.values):
            return int(self.max_positions * self.number("factor"))
        if self.kind == "yarn" and _ORIGINAL in self.values:
            return max(self.max_positions, int(self.original_positions * self.number("factor")))
        return self.max_positions


def read_rope(
    config: HFConfig,
    *,
    max_positions: int,
    default_theta: float = 10000.0,
    values: Mapping[str, Any] | None = None,
    partial: float | None = None,
) -> RopeParameters:
    """The rope entry: `values` where given, else the config's `rope_scaling` or `rope_parameters` with `rope_theta` beside or in it.

    Args:
        config: the model's config.
        max_positions: positions that the config gives the model.
        default_theta: the base where the config has none.
        values: the entry, where the family keeps it elsewhere.
        partial: the rotated part of a head where the config does not say; None for architectures that always rotate all of it.

    Raises:
        ModelLoadError: an unknown rope type, or keys that do not belong to it.
    """
    if values is None:
        old, new = config.get("rope_scaling"), config.get("rope_parameters")
        values = old or new or {}
        default_theta = config.number("rope_theta", default_theta)
    if not isinstance(values, Mapping):
        raise ModelLoadError(f"config.json: rope parameters must be an object, got {values!r}")
    values = {key: value for key, value in values.items() if value is not None}
    kind = values.pop("rope_type", None) or values.get("type", "default")
    values.pop("type", None)
    kind = {"su": "longrope"}.get(kind, kind)
    if kind not in _KINDS:
        raise ModelLoadError(f"config.json: rope type {kind!r} is not supported; supported: {', '.join(_KINDS)}")
    theta = values.pop("rope_theta", default_theta)
    rotated = values.pop("partial_rotary_factor", config.get("partial_rotary_factor", 1.0 if partial is None else partial))
    if partial is None and rotated != 1.0:
        raise ModelLoadError("config.json: partial_rotary_factor other than 1 is not supported for this architecture")
    unknown = values.keys() - _KINDS[kind].keys
    if unknown:
        raise ModelLoadError(f"config.json: rope type {kind!r} does not know {', '.join(sorted(unknown))}")
    original = config.get(_ORIGINAL, values.get(_ORIGINAL, max_positions))
    return RopeParameters(kind, float(theta), values, max_positions, int(original), float(rotated))


class LayerRopes(NamedTuple):
    """The ropes of full and of windowed layers."""

    full: RopeParameters
    windowed: RopeParameters


def by_layer_type(config: HFConfig) -> Mapping[str, Mapping[str, Any]]:
    """The config's `rope_parameters` by layer type; empty where it has none.

    Raises:
        ModelLoadError: something else than entries of full and windowed layers.
    """
    nested = config.get("rope_parameters", {})
    if not isinstance(nested, Mapping) or nested.keys() - {"full_attention", "sliding_attention"}:
        raise ModelLoadError(f"config.json: rope_parameters must have entries full_attention and sliding_attention, got {nested!r}")
    return {kind: values or {} for kind, values in nested.items()}


def read_layer_ropes(config: HFConfig, *, max_positions: int, default_theta: float, windowed_theta: float) -> LayerRopes:
    """Ropes by layer type. Older configs have `rope_theta` and `rope_scaling` for the full layers only, and maybe
    `rope_local_base_freq`; newer ones have `rope_parameters` by layer type.

    Args:
        max_positions: positions that the config gives the model.
        default_theta, windowed_theta: the bases of full and windowed layers where the config does not say.
    """
    nested = by_layer_type(config)
    full = {**nested.get("full_attention", {}), **config.get("rope_scaling", {})}
    return LayerRopes(
        read_rope(config, max_positions=max_positions, default_theta=config.number("rope_theta", default_theta), values=full),
        read_rope(config, max_positions=max_positions, default_theta=windowed_theta, values=nested.get("sliding_attention", {})),
    )


def rope_spec(parameters: RopeParameters, head_dim: int, max_model_len: int, *, interleaved: bool = False) -> RopeSpec:
    """Frequencies for heads of `head_dim` in an engine whose sequences have at most `max_model_len` positions.

    Raises:
        ModelLoadError: an odd number of dimensions to rotate.
    """
    rotated = head_dim if parameters.kind == "proportional" else int(head_dim * parameters.partial)
    if rotated % 2 or not rotated:
        raise ModelLoadError(f"config.json: rotary embeddings need an even head_dim, got {rotated} dimensions to rotate")
    frequencies, magnitude = _KINDS[parameters.kind].compute(parameters, rotated, max_model_len)
    return RopeSpec(tuple(float(f) for f in frequencies.astype(np.float32)), magnitude, interleaved)


def _exponents(dim: int) -> np.ndarray:
    return np.arange(0, dim, 2).astype(np.float32) / np.float32(dim)


def _base_frequencies(theta: float, dim: int) -> np.ndarray:
    return np.float32(1.0) / np.power(np.float32(theta), _exponents(dim))


def _default(p: RopeParameters, dim: int, max_model_len: int) -> tuple[np.ndarray, float]:
    return _base_frequencies(p.theta, dim), 1.0


def _linear(p: RopeParameters, dim: int, max_model_len: int) -> tuple[np.ndarray, float]:
    return _base_frequencies(p.theta, dim) / np.float32(p.number("factor")), 1.0


def _proportional(p: RopeParameters, dim: int, max_model_len: int) -> tuple[np.ndarray, float]:
    """Frequencies of whole heads, of which the slowest stand still (Gemma 4)."""
    moving = int(p.partial * dim // 2)
    frequencies = _base_frequencies(p.theta, dim) / np.float32(p.values.get("factor", 1.0))
    return np.where(np.arange(dim // 2) < moving, frequencies, np.float32(0)), 1.0


def _dynamic(p: RopeParameters, dim: int, max_model_len: int) -> tuple[np.ndarray, float]:
    if p.values.get("alpha"):
        # Hunyuan stretches the base once and for all.
        return _base_frequencies(p.theta * p.number("alpha") ** (dim / (dim - 2)), dim), 1.0
    length = max(max_model_len, p.max_positions)
    factor = p.number("factor")
    theta = p.theta * (factor * length / p.max_positions - (factor - 1)) ** (dim / (dim - 2))
    return _base_frequencies(theta, dim), 1.0


def _yarn(p: RopeParameters, dim: int, max_model_len: int) -> tuple[np.ndarray, float]:
    """YaRN (Peng et al., 2023, arXiv:2309.00071)."""
    factor = p.number("factor") if "factor" in p.values else p.max_positions / p.original_positions

    def rotations_to_dim(rotations: float) -> float:
        return dim * math.log(p.original_positions / (rotations * 2 * math.pi)) / (2 * math.log(p.theta))

    low = rotations_to_dim(p.values.get("beta_fast") or 32)
    high = rotations_to_dim(p.values.get("beta_slow") or 1)
    if p.values.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)
    keep = np.float32(1) - ramp
    powers = np.power(np.float32(p.theta), _exponents(dim))
    frequencies = np.float32(1) / (np.float32(factor) * powers) * (np.float32(1) - keep) + np.float32(1) / powers * keep

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if "attention_factor" in p.values:
        magnitude = p.number("attention_factor")
    elif p.values.get("mscale") and p.values.get("mscale_all_dim"):
        magnitude = mscale(p.number("mscale")) / mscale(p.number("mscale_all_dim"))
    else:
        magnitude = mscale(1.0)
    return frequencies, magnitude


def _longrope(p: RopeParameters, dim: int, max_model_len: int) -> tuple[np.ndarray, float]:
    """LongRoPE (Ding et al., 2024, arXiv:2402.13753)."""
    key = "long_factor" if max_model_len > p.original_positions else "short_factor"
    factors = np.asarray(p.values.get(key, ()), np.float32)
    if factors.shape != (dim // 2,):
        raise ModelLoadError(f"config.json: longrope needs {dim // 2} numbers in {key!r}, got {factors.size}")
    scale = "long_mscale" if key == "long_factor" else "short_mscale"
    if scale in p.values:
        magnitude = p.number(scale)
    elif "attention_factor" in p.values:
        magnitude = p.number("attention_factor")
    else:
        factor = p.number("factor") if "factor" in p.values else p.max_positions / p.original_positions
        magnitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(p.original_positions))
    return np.float32(1) / (factors * np.power(np.float32(p.theta), _exponents(dim))), magnitude


def _llama3(p: RopeParameters, dim: int, max_model_len: int) -> tuple[np.ndarray, float]:
    factor, low, high = np.float32(p.number("factor")), p.number("low_freq_factor"), p.number("high_freq_factor")
    frequencies = _base_frequencies(p.theta, dim)
    wavelengths = np.float32(2 * math.pi) / frequencies
    scaled = np.where(wavelengths > p.original_positions / low, frequencies / factor, frequencies)
    if low == high:  # Llama 4: there is nothing between the two
        return scaled, 1.0
    smooth = (np.float32(p.original_positions) / wavelengths - np.float32(low)) / np.float32(high - low)
    blended = (np.float32(1) - smooth) * scaled / factor + smooth * scaled
    between = (wavelengths >= p.original_positions / high) & (wavelengths <= p.original_positions / low)
    return np.where(between, blended, scaled), 1.0


@dataclass(frozen=True)
class _Kind:
    keys: frozenset[str]
    compute: Callable[[RopeParameters, int, int], tuple[np.ndarray, float]]


_KINDS = {
    "default": _Kind(frozenset(), _default),
    "linear": _Kind(frozenset({"factor"}), _linear),
    "proportional": _Kind(frozenset({"factor"}), _proportional),
    "dynamic": _Kind(frozenset({"factor", "alpha"}), _dynamic),
    "llama3": _Kind(frozenset({"factor", "low_freq_factor", "high_freq_factor", _ORIGINAL}), _llama3),
    "yarn": _Kind(
        frozenset({"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "finetuned", _ORIGINAL}),
        _yarn,
    ),
    "longrope": _Kind(
        frozenset({"factor", "attention_factor", "short_factor", "long_factor", "short_mscale", "long_mscale", _ORIGINAL}), _longrope
    ),
}
