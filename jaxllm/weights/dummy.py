"""Random weights of a model's shape, for benchmarks and memory trials without a checkpoint."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxllm.weights.rules import Loadable

# Drawn once a parameter and repeated: drawing every element of a large model takes minutes. A prime, so that rows differ.
_BLOCK = 1_000_003


def dummy_params(model_def: Loadable, place: Callable[[str, np.ndarray], Any], seed: int = 0) -> list[Any]:
    """Every parameter in the order of `model_def.names`, as `load_params` returns them.

    Norm weights are 1, biases small, matrices scaled by their inputs, so that activations and logits stay finite in any dtype. The
    same seed gives the same weights.
    """
    return [place(name, _values(name, model_def.shapes[name], seed)) for name in model_def.names]


def _values(name: str, abstract: Any, seed: int) -> np.ndarray:
    shape, dtype = tuple(abstract.shape), np.dtype(abstract.dtype)
    if name.endswith("norm.weight"):
        return np.ones(shape, dtype)
    generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
    scale = 0.02 if name.endswith("bias") or len(shape) < 2 else shape[-1] ** -0.5
    size = int(np.prod(shape))
    block = (generator.standard_normal(min(size, _BLOCK), dtype=np.float32) * scale).astype(dtype)
    return np.resize(block, shape)
