"""How checkpoint tensors become a parameter: copies, fusions and the replication of KV heads.

Each transform knows the shapes it needs of its sources, given the shape of the parameter, and writes straight into the finished
array, so that no intermediate copy of a parameter exists.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

Shape = tuple[int, ...]


@dataclass(frozen=True)
class CheckpointDims:
    """Sizes that the checkpoint has and the parameters may exceed: token rows (padding) and KV heads (replication)."""

    vocab_size: int
    num_kv_heads: int


class Transform(Protocol):
    def source_shapes(self, shape: Shape, dims: CheckpointDims) -> tuple[Shape, ...]:
        """Shapes [out, in] of the sources of a parameter of `shape`."""
        ...

    def build(self, sources: Sequence[np.ndarray], shape: Shape, dtype: np.dtype, dims: CheckpointDims) -> np.ndarray:
        """The parameter of `shape` and `dtype`."""
        ...


@dataclass(frozen=True)
class Copy:
    """The tensor itself."""

    def source_shapes(self, shape: Shape, dims: CheckpointDims) -> tuple[Shape, ...]:
        return (shape,)

    def build(self, sources: Sequence[np.ndarray], shape: Shape, dtype: np.dtype, dims: CheckpointDims) -> np.ndarray:
        return np.ascontiguousarray(sources[0], dtype)


@dataclass(frozen=True)
class TokenRows:
    """One row a token, then rows of zeros up to the parameter's size."""

    def source_shapes(self, shape: Shape, dims: CheckpointDims) -> tuple[Shape, ...]:
        return ((dims.vocab_size, *shape[1:]),)

    def build(self, sources: Sequence[np.ndarray], shape: Shape, dtype: np.dtype, dims: CheckpointDims) -> np.ndarray:
        if shape[0] == dims.vocab_size:
            return COPY.build(sources, shape, dtype, dims)
        array = np.zeros(shape, dtype)
        array[: dims.vocab_size] = sources[0]
        return array


@dataclass(frozen=True)
class Interleave:
    """n tensors (or biases) of one shape as [N, n, rows / N, *in]: N groups with an equal share of each (gate and up)."""

    def source_shapes(self, shape: Shape, dims: CheckpointDims) -> tuple[Shape, ...]:
        return ((shape[0] * shape[2], *shape[3:]),) * shape[1]

    def build(self, sources: Sequence[np.ndarray], shape: Shape, dtype: np.dtype, dims: CheckpointDims) -> np.ndarray:
        array = np.empty(shape, dtype)
        for i, source in enumerate(sources):
            array[:, i] = source.reshape(shape[0], *shape[2:])
        return array


@dataclass(frozen=True)
class FuseQKV:
    """Query, key and value projections (or their biases) as [K', G' + 2, D, *in]; a KV head is repeated K' / K times, with a share of
    its query heads each.
    """

    def source_shapes(self, shape: Shape, dims: CheckpointDims) -> tuple[Shape, ...]:
        kv_heads, group, dim = shape[0], shape[1] - 2, shape[2]
        kv = (dims.num_kv_heads * dim, *shape[3:])
        return ((kv_heads * group * dim, *shape[3:]), kv, kv)

    def build(self, sources: Sequence[np.ndarray], shape: Shape, dtype: np.dtype, dims: CheckpointDims) -> np.ndarray:
        kv_heads, group, rest = shape[0], shape[1] - 2, shape[2:]
        copies = kv_heads // dims.num_kv_heads
        q, k, v = sources
        array = np.empty(shape, dtype)
        array[:, :group] = q.reshape(kv_heads, group, *rest)
        for copy in range(copies):
            array[copy::copies, group] = k.reshape(dims.num_kv_heads, *rest)
            array[copy::copies, group + 1] = v.reshape(dims.num_kv_heads, *rest)
        return array


@dataclass(frozen=True)
class SplitInputs:
    """A projection [M, H * D] with its inputs split into axes (query heads by KV head, for the output projection)."""

    def source_shapes(self, shape: Shape, dims: CheckpointDims) -> tuple[Shape, ...]:
        return ((shape[0], math.prod(shape[1:])),)

    def build(self, sources: Sequence[np.ndarray], shape: Shape, dtype: np.dtype, dims: CheckpointDims) -> np.ndarray:
        return np.ascontiguousarray(sources[0], dtype).reshape(shape)


@dataclass(frozen=True)
class Flat:
    """A vector whose entries are split into axes (a number a head)."""

    def source_shapes(self, shape: Shape, dims: CheckpointDims) -> tuple[Shape, ...]:
        return ((math.prod(shape),),)

    def build(self, sources: Sequence[np.ndarray], shape: Shape, dtype: np.dtype, dims: CheckpointDims) -> np.ndarray:
        return np.ascontiguousarray(sources[0], dtype).reshape(shape)


COPY = Copy()
TOKEN_ROWS = TokenRows()
INTERLEAVE = Interleave()
FUSE_QKV = FuseQKV()
SPLIT_INPUTS = SplitInputs()
FLAT = Flat()
