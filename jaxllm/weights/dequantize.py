"""Checkpoints whose tensors are stored quantized, read as if they were not.

- MXFP4 (OCP Microscaling Formats v1.0): `NAME_blocks` and `NAME_scales` in place of stacked experts NAME; 4-bit floats, two a byte, lower
  half first, with a power of two for each 32 of them.
- FP8 in blocks (DeepSeek-V3): NAME in 8-bit floats, and in `NAME_scale_inv` what each square of 128 rows and columns is multiplied by.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np

from jaxllm.weights.checkpoint import Checkpoint

logger = logging.getLogger(__name__)

_FP4 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0], np.float32)
_BLOCKS, _SCALES, _INVERSE = "_blocks", "_scales", "_scale_inv"
_FP8_BLOCK = 128


def dequantized(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint, with plain tensors where it has quantized ones."""
    names = set(checkpoint.names())
    stacks = {name.removesuffix(_BLOCKS) for name in names if name.endswith(_BLOCKS)}
    mxfp4 = frozenset(name for name in stacks if name + _SCALES in names)
    fp8 = frozenset(name for name in names if name + _INVERSE in names)
    if not mxfp4 and not fp8:
        return checkpoint
    kind = "MXFP4" if mxfp4 else "FP8"
    logger.info("%s is stored in %s: its weights are dequantized, and take the memory of the compute dtype", checkpoint.location, kind)
    return _Dequantized(checkpoint, mxfp4, fp8)


class _Dequantized:
    def __init__(self, inner: Checkpoint, mxfp4: frozenset[str], fp8: frozenset[str]):
        self._inner, self._mxfp4, self._fp8 = inner, mxfp4, fp8

    @property
    def location(self) -> str:
        return self._inner.location

    def names(self) -> Iterable[str]:
        parts = {name + suffix for name in self._mxfp4 for suffix in (_BLOCKS, _SCALES)} | {name + _INVERSE for name in self._fp8}
        return [*(name for name in self._inner.names() if name not in parts), *sorted(self._mxfp4)]

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._mxfp4:
            return self._inner.shape(name)
        experts, out, groups, size = self._inner.shape(name + _BLOCKS)
        return experts, groups * size * 2, out

    def dtype(self, name: str) -> np.dtype:
        if name in self._mxfp4:
            return np.dtype(ml_dtypes.bfloat16)
        return np.dtype(np.float32) if name in self._fp8 else self._inner.dtype(name)

    def read(self, name: str) -> Any:
        if name in self._mxfp4:
            return StackedMxfp4(self._inner.read(name + _BLOCKS), self._inner.read(name + _SCALES))
        if name not in self._fp8:
            return self._inner.read(name)
        tensor, scales = self._inner.read(name).astype(np.float32), self._inner.read(name + _INVERSE).astype(np.float32)
        for row in range(0, len(tensor), _FP8_BLOCK):
            factors = np.repeat(scales[row // _FP8_BLOCK], _FP8_BLOCK)[: tensor.shape[1]]
            tensor[row : row + _FP8_BLOCK] *= factors
        return tensor


class StackedMxfp4:
    """The experts [E, in, out] that a checkpoint keeps as `blocks` [E, out, in / 32, 16] and `scales` [E, out, in / 32], one at a time."""

    def __init__(self, blocks: np.ndarray, scales: np.ndarray):
        self._blocks, self._scales = blocks, scales

    def __getitem__(self, expert: int) -> np.ndarray:
        blocks, exponents = self._blocks[expert], self._scales[expert].astype(np.int32) - 127
        values = np.stack([_FP4[blocks & 15], _FP4[blocks >> 4]], axis=-1).reshape(*exponents.shape, -1)
        # 4-bit floats times powers of two are bfloat16 numbers.
        scaled = np.ldexp(values, exponents[..., None]).astype(ml_dtypes.bfloat16)
        return scaled.reshape(len(blocks), -1).T
