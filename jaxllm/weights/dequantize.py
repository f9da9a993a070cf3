"""Checkpoints whose tensors are stored quantized, read as if they were not.

- MXFP4 (OCP Microscaling Formats v1.0): `NAME_blocks` and `NAME_scales` in place of stacked experts NAME; 4-bit floats, two a byte, lower
  half first, with a power of two for each 32 of them.
- FP8 in blocks (DeepSeek-V3): NAME in 8-bit floats, and in `NAME_scale_inv` what each square of 128 rows and columns is multiplied by.
"""

from __future__ import annotations

import logging
from functools import partial

import ml_dtypes
import numpy as np

from jaxllm.errors import ModelLoadError
from jaxllm.weights.checkpoint import Checkpoint, Tensor

logger = logging.getLogger(__name__)

_FP4 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0], np.float32)
_BLOCKS, _SCALES, _INVERSE = "_blocks", "_scales", "_scale_inv"
_FP8_BLOCK = 128


def dequantized(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint, with plain tensors where it has quantized ones.

    Raises:
        ModelLoadError: scales of another granularity.
    """
    names = set(checkpoint.names())
    stacks = {name.removesuffix(_BLOCKS) for name in names if name.endswith(_BLOCKS)}
    mxfp4 = frozenset(name for name in stacks if name + _SCALES in names)
    fp8 = frozenset(name for name in names if name + _INVERSE in names)
    if not mxfp4 and not fp8:
        return checkpoint
    kind = "MXFP4" if mxfp4 else "FP8"
    logger.info("%s is stored in %s: its weights are dequantized, and take the memory of the compute dtype", checkpoint.location, kind)
    parts = {name + suffix for name in mxfp4 for suffix in (_BLOCKS, _SCALES)} | {name + _INVERSE for name in fp8}
    tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if name not in parts}
    for name in fp8:
        stored, scales = tensors[name], checkpoint.tensors[name + _INVERSE]
        if len(stored.shape) != 2 or scales.shape != tuple(-(-size // _FP8_BLOCK) for size in stored.shape):
            raise ModelLoadError(
                f"{checkpoint.location}: {name} is {list(stored.shape)} with scales {list(scales.shape)}; FP8 is supported with one scale"
                f" for each square of {_FP8_BLOCK} rows and columns of a matrix"
            )
        tensors[name] = Tensor(stored.shape, np.dtype(np.float32), partial(_read_fp8, stored, scales))
    for name in sorted(mxfp4):
        blocks, scales = checkpoint.tensors[name + _BLOCKS], checkpoint.tensors[name + _SCALES]
        experts, out, groups, size = blocks.shape
        shape = (experts, groups * size * 2, out)
        tensors[name] = Tensor(shape, np.dtype(ml_dtypes.bfloat16), partial(StackedMxfp4, blocks, scales))
    return Checkpoint(checkpoint.location, tensors)


def _read_fp8(stored: Tensor, inverse: Tensor) -> np.ndarray:
    tensor, scales = stored.read().astype(np.float32), inverse.read().astype(np.float32)
    for row in range(0, len(tensor), _FP8_BLOCK):
        factors = np.repeat(scales[row // _FP8_BLOCK], _FP8_BLOCK)[: tensor.shape[1]]
        tensor[row : row + _FP8_BLOCK] *= factors
    return tensor


class StackedMxfp4:
    """The experts [E, in, out] that a checkpoint keeps as `blocks` [E, out, in / 32, 16] and `scales` [E, out, in / 32], one at a time."""

    def __init__(self, blocks: Tensor, scales: Tensor):
        self._blocks, self._scales = blocks.read(), scales.read()

    def __getitem__(self, expert: int) -> np.ndarray:
        blocks, exponents = self._blocks[expert], self._scales[expert].astype(np.int32) - 127
        values = np.stack([_FP4[blocks & 15], _FP4[blocks >> 4]], axis=-1).reshape(*exponents.shape, -1)
        # 4-bit floats times powers of two are bfloat16 numbers.
        scaled = np.ldexp(values, exponents[..., None]).astype(ml_dtypes.bfloat16)
        return scaled.reshape(len(blocks), -1).T
