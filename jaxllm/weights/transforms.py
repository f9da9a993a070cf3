"""How checkpoint tensors become a parameter: copies, fusions and the replication of KV heads.

Each transform knows the shapes it needs of its sources, given the shape of the parameter, and writes straight into the finished
array, so that no intermediate copy of a parameter exists.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

Shape = tuple[int, ...]
# Of memory that XLA takes over from the host as it is.
ALIGNMENT = 64


def empty(shape: Shape, dtype: np.dtype) -> np.ndarray:
    """An array that a CPU device takes over without a copy. Of pages of its own, small ones: huge ones take longer to come."""
    count = math.prod(shape)
    memory = mmap.mmap(-1, max(count * dtype.itemsize, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(memory, dtype, count).reshape(shape)


def contiguous(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The array itself where nothing has to change, else a copy that a CPU device takes over."""
    if array.dtype == dtype and array.flags.c_contiguous:
        return array
    copy = empty(array.shape, dtype)
    copy[...] = array
    return copy


@dataclass(frozen=True)
class CheckpointDims:
    """Sizes that the checkpoint has and the parameters may exceed: token rows (padding), KV heads and groups of states (replication).

    `rows` says for fused tensors of a recurrent layer what they hold for each group, in order: how many rows, and whether groups may be
    copies. `key_rows` and `value_rows` of each head's projection are its key and its value, where these become parameters of their own.
    """

    vocab_size: int
    num_kv_heads: int
    num_groups: int = 1
    rows: Mapping[str, tuple[tuple[int, bool], ...]] = field(default_factory=dict)
    key_rows: int = 0
    value_rows: int = 0


class Transform(Protocol):
    def source_shapes(self, shape: Shape, dims: CheckpointDims) -> tuple[Shape, ...]:
        """Shapes [out, in] of the sources of a parameter of `shape`."""
        ...

    def build(self, sources: Sequence[np.ndarray], shape: Shape, dtype: np.dtype, dims: CheckpointDims) -> np.ndarray:
        """The parameter of `shape` and `dtype`."""
        ...


@dataclass(frozen=True)
class Reshape:
    """The tensor itself, which the checkpoint keeps with fewer axes: with its `outputs` as one, as the weights [out, 1, W] of a
    convolution (`taps`), as one vector (`flat`), or as a matrix of one row (`row`).
    """

    stored: Literal["same", "outputs", "taps", "flat", "row"] = "same"

    def source_shapes(self, shape: Shape, dims: CheckpointDims) -> tuple[Shape, ...]:
        last, size = shape[-1:], math.prod(shape)
        outputs = (math.prod(shape[:-1]),)
        return (
            {
                "same": shape,
                "outputs": outputs + last,
                "taps": (*outputs, 1, *last),
                "flat": (size,),
                "row": (1, size),
            }[self.stored],
        )

    def build(self, sources: Sequence[np.ndarray], shape: Shape, dtype: np.dtype, dims: CheckpointDims) -> np.ndarray:
        return contiguous(sources[0], dtype).reshape(shape)


@dataclass(frozen=True)
class TokenRows:
    """One row a token, then rows of zeros up to the parameter's size. `flat`: a number a token, kept as a matrix of one row."""

    flat: bool = False

    def source_shapes(self, shape: Shape, dims: CheckpointDims) -> tuple[Shape, ...]:
        return ((1, dims.vocab_size) if self.flat else (dims.vocab_size, *shape[1:]),)

    def build(self, sources: Sequence[np.ndarray], shape: Shape, dtype: np.dtype, dims: CheckpointDims) -> np.ndarray:
        rows = sources[0].reshape(-1, *shape[1:])
        if shape[0] == dims.vocab_size:
            return COPY.build([rows], shape, dtype, dims)
        array = np.zeros(shape, dtype)
        array[: dims.vocab_size] = rows
        return array


@dataclass(frozen=True)
class Interleave:
    """n tensors (or biases) of one shape as [N, n, rows / N, *in]: N groups with an equal share of each (gate and up)."""

    def source_shapes(self, shape: Shape, dims: CheckpointDims) -> tuple[Shape, ...]:
        return ((shape[0] * shape[2], *shape[3:]),) * shape[1]

    def build(self, sources: Sequence[np.ndarray], shape: Shape, dtype: np.dtype, dims: CheckpointDims) -> np.ndarray:
        array = empty(shape, dtype)
        for i, source in enumerate(sources):
            array[:, i] = source.reshape(shape[0], *shape[2:])
        return array


@dataclass(frozen=True)
class FuseHeads:
    """Query, key and value projections (or their biases) as [K', G' + extra, D, *in]; a KV head is repeated K' / K times, with a share
    of its query heads each. `extra` says how many of key and value there are. The checkpoint keeps them as tensors of their own
    (`separate`), as one with all queries first (`joined`), or as one by KV head, a group's queries first (`grouped`). `gated`: each query
    head of a tensor of its own is followed by its gate, which `HeadGates` takes.
    """

    extra: int = 2
    stored: Literal["separate", "joined", "grouped"] = "separate"
    gated: bool = False

    def source_shapes(self, shape: Shape, dims: CheckpointDims) -> tuple[Shape, ...]:
        rest = shape[3:]
        queries, kv = shape[0] * (shape[1] - self.extra) * shape[2], dims.num_kv_heads * shape[2]
        if self.stored == "separate":
            return (((1 + self.gated) * queries, *rest), *((kv, *rest),) * self.extra)
        return ((queries + self.extra * kv, *rest),)

    def build(self, sources: Sequence[np.ndarray], shape: Shape, dtype: np.dtype, dims: CheckpointDims) -> np.ndarray:
        group, rest = shape[1] - self.extra, shape[2:]
        copies = shape[0] // dims.num_kv_heads
        array = empty(shape, dtype)
        if self.stored == "grouped":
            whole = sources[0].reshape(dims.num_kv_heads, copies * group + self.extra, *rest)
            queries, kv = whole[:, : copies * group], [whole[:, copies * group + i] for i in range(self.extra)]
        else:
            size = dims.num_kv_heads * shape[2]
            parts = (
                sources
                if self.stored == "separate"
                else np.split(sources[0], [len(sources[0]) - n * size for n in range(self.extra, 0, -1)])
            )
            queries, kv = parts[0], [part.reshape(dims.num_kv_heads, *rest) for part in parts[1:]]
            if self.gated:
                queries = queries.reshape(shape[0], group, 2, *rest)[:, :, 0]
        array[:, :group] = queries.reshape(shape[0], group, *rest)
        for i, part in enumerate(kv):
            for copy in range(copies):
                array[copy::copies, group + i] = part
        return array


@dataclass(frozen=True)
class HeadGates:
    """The gates [K', G', D, *in] of query heads, each of which the checkpoint keeps behind its head."""

    def source_shapes(self, shape: Shape, dims: CheckpointDims) -> tuple[Shape, ...]:
        return ((2 * math.prod(shape[:3]), *shape[3:]),)

    def build(self, sources: Sequence[np.ndarray], shape: Shape, dtype: np.dtype, dims: CheckpointDims) -> np.ndarray:
        return contiguous(sources[0].reshape(*shape[:2], 2, *shape[2:])[:, :, 1], dtype)


@dataclass(frozen=True)
class HeadVectors:
    """A vector for each head, of queries as [K', G', D], of keys as [K', D] with repetitions. The checkpoint keeps them in one row
    (`flat`), as `rows`, or as tensors of their own (`separate`).
    """

    stored: Literal["flat", "rows", "separate"]

    def source_shapes(self, shape: Shape, dims: CheckpointDims) -> tuple[Shape, ...]:
        heads = math.prod(shape[:-1]) if len(shape) == 3 else dims.num_kv_heads
        return {"flat": ((heads * shape[-1],),), "rows": ((heads, shape[-1]),), "separate": ((shape[-1],),) * heads}[self.stored]

    def build(self, sources: Sequence[np.ndarray], shape: Shape, dtype: np.dtype, dims: CheckpointDims) -> np.ndarray:
        rows = np.concatenate([source.reshape(-1, shape[-1]) for source in sources])
        return np.repeat(rows, math.prod(shape[:-1]) // len(rows), axis=0).reshape(shape).astype(dtype)


@dataclass(frozen=True)
class InterleaveInputs:
    """As `Interleave`, with the inputs before the outputs: `parts` tensors as [N, in, parts * rows / N]."""

    parts: int

    def source_shapes(self, shape: Shape, dims: CheckpointDims) -> tuple[Shape, ...]:
        return ((shape[0] * shape[2] // self.parts, shape[1]),) * self.parts

    def build(self, sources: Sequence[np.ndarray], shape: Shape, dtype: np.dtype, dims: CheckpointDims) -> np.ndarray:
        array = empty((*shape[:2], self.parts, shape[2] // self.parts), dtype)
        for i, source in enumerate(sources):
            array[:, :, i] = source.reshape(shape[0], -1, shape[1]).swapaxes(1, 2)
        return array.reshape(shape)


@dataclass(frozen=True)
class Transpose:
    """A projection [out, in] as [in, out]."""

    def source_shapes(self, shape: Shape, dims: CheckpointDims) -> tuple[Shape, ...]:
        return (shape[::-1],)

    def build(self, sources: Sequence[np.ndarray], shape: Shape, dtype: np.dtype, dims: CheckpointDims) -> np.ndarray:
        return contiguous(sources[0].T, dtype)


@dataclass(frozen=True)
class HeadRows:
    """The key's or the value's rows [H, rows, in] of a projection [H * (key rows + value rows), in]."""

    of_value: bool

    def source_shapes(self, shape: Shape, dims: CheckpointDims) -> tuple[Shape, ...]:
        return ((shape[0] * (dims.key_rows + dims.value_rows), *shape[2:]),)

    def build(self, sources: Sequence[np.ndarray], shape: Shape, dtype: np.dtype, dims: CheckpointDims) -> np.ndarray:
        heads = sources[0].reshape(shape[0], -1, *shape[2:])
        return contiguous(heads[:, dims.key_rows :] if self.of_value else heads[:, : dims.key_rows], dtype)


@dataclass(frozen=True)
class PickRows:
    """The rows of some tokens, of a tensor with one row a token; or as one row the `difference` of the second from the first."""

    token_ids: tuple[int, ...]
    difference: bool

    def source_shapes(self, shape: Shape, dims: CheckpointDims) -> tuple[Shape, ...]:
        return ((dims.vocab_size, *shape[1:]),)

    def build(self, sources: Sequence[np.ndarray], shape: Shape, dtype: np.dtype, dims: CheckpointDims) -> np.ndarray:
        rows = sources[0][list(self.token_ids)].astype(np.float32)
        return (rows[1:] - rows[:1] if self.difference else rows).astype(dtype)


@dataclass(frozen=True)
class GroupRows:
    """Rows that the checkpoint keeps part by part, for all groups each (`dims.rows[of]`), as [G', rows of a group, *in].

    `of` may name several sources by how many parts each has. Where `taps`, the sources are weights [out, 1, W] of a convolution.
    """

    of: str
    parts: tuple[int, ...] = ()
    taps: bool = False

    def _shares(self, groups: int, dims: CheckpointDims) -> list[tuple[int, int]]:
        """(rows of a group, groups that the checkpoint has) of each part."""
        return [(rows, dims.num_groups if copies else groups) for rows, copies in dims.rows[self.of]]

    def source_shapes(self, shape: Shape, dims: CheckpointDims) -> tuple[Shape, ...]:
        shares = self._shares(shape[0], dims)
        rest = (1, *shape[2:]) if self.taps else shape[2:]
        shapes: list[Shape] = []
        for count in self.parts or (len(shares),):
            shapes.append((sum(rows * groups for rows, groups in shares[:count]), *rest))
            shares = shares[count:]
        return tuple(shapes)

    def build(self, sources: Sequence[np.ndarray], shape: Shape, dtype: np.dtype, dims: CheckpointDims) -> np.ndarray:
        array = empty(shape, dtype)
        shares = iter(self._shares(shape[0], dims))
        place = 0
        for source, count in zip(sources, self.parts or (len(dims.rows[self.of]),), strict=True):
            start = 0
            for rows, groups in (next(shares) for _ in range(count)):
                part = source[start : start + rows * groups].reshape(groups, rows, *shape[2:])
                array[:, place : place + rows] = np.repeat(part, shape[0] // groups, axis=0)
                start, place = start + rows * groups, place + rows
        return array


COPY = Reshape()
TOKEN_ROWS = TokenRows()
TOKEN_ROW = TokenRows(flat=True)
INTERLEAVE = Interleave()
TRANSPOSE = Transpose()
FUSE_QKV = FuseHeads()
FUSE_Q = FuseHeads(extra=0)
JOINED_QKV = FuseHeads(stored="joined")
GROUPED_QKV = FuseHeads(stored="grouped")
FLAT = Reshape("flat")
GATED_QKV = FuseHeads(gated=True)
HEAD_GATES = HeadGates()
SPLIT_OUTPUTS = Reshape("outputs")
TAPS = Reshape("taps")
ROW = Reshape("row")
HEAD_KEYS = HeadRows(of_value=False)
HEAD_VALUES = HeadRows(of_value=True)
