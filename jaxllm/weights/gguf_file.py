"""The GGUF container (versions 2 and 3, little endian): metadata and the table of tensors, read from a memory map.

The layout is that of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The reader of the `gguf` package keeps every string as
an array of its own and takes seconds for a vocabulary; this one takes milliseconds. Quantized data is decoded in `weights/gguf.py`.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jaxllm.errors import ModelLoadError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# Value type -> struct code. 8 is a string, 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
# llama.cpp's names for the parts of a split model.
_PART = re.compile(r"(.+)-(\d{5})-of-\d{5}\.gguf")
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor as stored: `shape` outermost first (as numpy has it), `type_id` ggml's storage type, `offset` in `data`, the memory map
    of the whole file."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int
    data: mmap.mmap = field(repr=False, compare=False)


@dataclass(frozen=True)
class GGUFFile:
    """A parsed file, or the parsed parts of a model that was split over several files."""

    path: Path
    metadata: Mapping[str, Any] = field(repr=False)
    tensors: dict[str, GGUFTensor] = field(repr=False)


def read_gguf(path: Path) -> GGUFFile:
    """Parse the head of a GGUF file, and those of its further parts where it is the first of a split model; tensor data is not touched.

    Raises:
        ModelLoadError: no such file, a missing part, not GGUF, an unsupported version, or cut off.
    """
    first = _read_part(path)
    parts = first.metadata.get("split.count", 1)
    if parts <= 1:
        return first
    name = _PART.fullmatch(path.name)
    if name is None or int(name[2]) != 1:
        raise ModelLoadError(f"{path} is one of {parts} parts of a model; name the first one (…-00001-of-{parts:05d}.gguf)")
    tensors = dict(first.tensors)
    for i in range(2, parts + 1):
        tensors |= _read_part(path.with_name(f"{name[1]}-{i:05d}-of-{parts:05d}.gguf")).tensors
    return replace(first, tensors=tensors)


def _read_part(path: Path) -> GGUFFile:
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    if data[:4] != _MAGIC:
        raise ModelLoadError(f"{path} is not a GGUF file: it starts with {data[:4]!r}")
    try:
        return _parse(path, data)
    except (struct.error, UnicodeDecodeError, IndexError) as error:
        raise ModelLoadError(f"{path} is cut off or damaged: its header does not parse ({error})") from error


def _parse(path: Path, data: mmap.mmap) -> GGUFFile:
    version, num_tensors, num_entries = struct.unpack_from("<IQQ", data, 4)
    if version not in _VERSIONS:
        raise ModelLoadError(f"{path} is GGUF version {version}; little-endian versions 2 and 3 are supported")
    at = 24
    metadata: dict[str, Any] = {}
    for _ in range(num_entries):
        key, at = _string(data, at)
        (kind,) = _U32.unpack_from(data, at)
        metadata[key], at = _value(path, data, at + 4, kind)
    heads = []
    for _ in range(num_tensors):
        name, at = _string(data, at)
        (rank,) = _U32.unpack_from(data, at)
        *dims, type_id, offset = struct.unpack_from(f"<{rank}QIQ", data, at + 4)
        at += 4 + 8 * rank + 12
        heads.append((name, tuple(reversed(dims)), type_id, offset))
    alignment = metadata.get("general.alignment", 32)
    start = math.ceil(at / alignment) * alignment
    tensors = {name: GGUFTensor(name, shape, type_id, start + offset, data) for name, shape, type_id, offset in heads}
    return GGUFFile(path, metadata, tensors)


def _string(data: mmap.mmap, at: int) -> tuple[str, int]:
    (length,) = _U64.unpack_from(data, at)
    end = at + 8 + length
    if end > len(data):
        raise IndexError("a string runs past the end")
    # A few vocabularies hold pieces that are not UTF-8; they stay distinguishable and are never valid input.
    return data[at + 8 : end].decode("utf-8", "surrogateescape"), end


def _value(path: Path, data: mmap.mmap, at: int, kind: int) -> tuple[Any, int]:
    if kind in _SCALARS:
        code = "<" + _SCALARS[kind]
        return struct.unpack_from(code, data, at)[0], at + struct.calcsize(code)
    if kind == _STRING:
        return _string(data, at)
    if kind != _ARRAY:
        raise ModelLoadError(f"{path} holds a metadata value of unknown type {kind}")
    item_kind, count = struct.unpack_from("<IQ", data, at)
    at += 12
    if item_kind in _SCALARS:
        code = f"<{count}{_SCALARS[item_kind]}"
        return list(struct.unpack_from(code, data, at)), at + struct.calcsize(code)
    items = []
    for _ in range(count):
        item, at = _value(path, data, at, item_kind)
        items.append(item)
    return items, at
