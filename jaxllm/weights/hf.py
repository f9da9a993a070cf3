"""Safetensors checkpoints: one file or shards with an index, memory-mapped, headers read without the data."""

from __future__ import annotations

import functools
import json
import math
import mmap
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxllm.errors import ModelLoadError
from jaxllm.weights.checkpoint import Checkpoint, Tensor
from jaxllm.weights.dequantize import dequantized

_DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# A header longer than this is a broken file.
_MAX_HEADER = 256 * 2**20


def open_checkpoint(directory: str | Path) -> Checkpoint:
    """Open the safetensors files of a Hugging Face directory.

    Raises:
        ModelLoadError: no safetensors files, a shard that is missing, cut off or unreadable, an index that does not describe the files.
    """
    return dequantized(Checkpoint(str(directory), _tensors(Path(directory))))


def _tensors(directory: Path) -> dict[str, Tensor]:
    index = directory / _INDEX
    if index.is_file():
        return _indexed_tensors(directory, index)
    if (directory / _SINGLE).is_file():
        return _read_header(directory / _SINGLE)
    files = sorted(directory.glob("*.safetensors"))
    # Mistral's own format, a second copy of the weights under other names.
    files = [file for file in files if not file.name.startswith("consolidated")] or files
    if not files:
        others = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for file in directory.glob(pattern))
        found = f" (found {', '.join(others[:5])}: these formats are not read from a directory)" if others else ""
        raise ModelLoadError(f"{directory} has no .safetensors files{found}")
    _check_numbering(directory, files)
    tensors: dict[str, Tensor] = {}
    for file in files:
        header = _read_header(file)
        if twice := header.keys() & tensors.keys():
            first = next(other for other in files if min(twice) in _read_header(other))
            raise ModelLoadError(f"{min(twice)} is in both {first} and {file}, and there is no {_INDEX} to say which counts")
        tensors |= header
    return tensors


def _indexed_tensors(directory: Path, index: Path) -> dict[str, Tensor]:
    try:
        weight_map = json.loads(index.read_text("utf-8"))["weight_map"]
        files = sorted(set(weight_map.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{index} is not a safetensors index: {error!r}") from error
    missing = [name for name in files if not (directory / name).is_file()]
    if missing:
        hint = f"; if {_SINGLE} is complete, delete {_INDEX}" if (directory / _SINGLE).is_file() else "; the download is not complete"
        raise ModelLoadError(f"{index} lists files that are not there: {', '.join(missing)}{hint}")
    headers = {name: _read_header(directory / name) for name in files}
    tensors = {}
    for tensor, file in weight_map.items():
        if tensor not in headers[file]:
            raise ModelLoadError(f"{index} says that {tensor} is in {file}, which does not have it: the index is stale")
        tensors[tensor] = headers[file][tensor]
    unlisted = [f"{tensor} ({file})" for file, header in headers.items() for tensor in header if tensor not in weight_map]
    if unlisted:
        raise ModelLoadError(f"{index} does not list tensors that are in its files: {', '.join(unlisted[:8])}: the index is stale")
    return tensors


def _check_numbering(directory: Path, files: list[Path]) -> None:
    """Shards without an index still say in their names how many there are."""
    for file in files:
        match = re.fullmatch(r"(.+)-\d+-of-(\d+)\.safetensors", file.name)
        if not match:
            continue
        width = len(match[2])
        expected = [f"{match[1]}-{i:0{width}d}-of-{match[2]}.safetensors" for i in range(1, int(match[2]) + 1)]
        missing = [name for name in expected if not (directory / name).is_file()]
        if missing:
            raise ModelLoadError(f"{directory} lacks shards: {', '.join(missing[:8])}")


def _read_header(path: Path) -> dict[str, Tensor]:
    """The tensors of one file.

    Raises:
        ModelLoadError: not a safetensors file, a dtype that is not known, or data that ends before its tensors do.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_MAX_HEADER, size - 8):
                raise ValueError(f"header of {length} bytes in a file of {size}")
            header = json.loads(file.read(length))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} is not a readable safetensors file: {error}") from error
    tensors = {}
    for name, info in header.items():
        if name == "__metadata__":
            continue
        if info["dtype"] not in _DTYPES:
            raise ModelLoadError(f"{path}: {name} has dtype {info['dtype']}, which is not supported")
        dtype, shape = np.dtype(_DTYPES[info["dtype"]]), tuple(info["shape"])
        begin, end = info["data_offsets"]
        if end - begin != math.prod(shape) * dtype.itemsize or 8 + length + end > size:
            raise ModelLoadError(f"{path} is cut off or damaged at {name}: {size} bytes, {8 + length + end} needed")
        tensors[name] = Tensor(shape, dtype, functools.partial(_read, path, shape, dtype, 8 + length + begin))
    return tensors


def _read(path: Path, shape: tuple[int, ...], dtype: np.dtype, offset: int) -> np.ndarray:
    """A read-only view of mapped memory, whose pages are loaded when they are touched. The map goes with the view: what was copied does
    not stay in memory beside its copy.
    """
    count = math.prod(shape)
    if count == 0:
        return np.empty(shape, dtype)
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return np.frombuffer(mapped, dtype, count, offset).reshape(shape)
