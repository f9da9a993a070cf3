"""Tensors of a GGUF file as a Hugging Face checkpoint: the same names, layouts and values, quantized blocks expanded to float32."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np

from jaxllm.errors import ModelLoadError
from jaxllm.weights.checkpoint import Checkpoint, Tensor
from jaxllm.weights.gguf_config import ROPE_FACTORS
from jaxllm.weights.gguf_file import GGUFFile, GGUFTensor, read_gguf

# ggml's storage types, by number. Plain ones are read as they are; the blocks of the others are expanded by the `gguf` package.
_PLAIN: dict[int, np.dtype] = {0: np.dtype(np.float32), 1: np.dtype(np.float16), 30: np.dtype(ml_dtypes.bfloat16)}
_QUANTIZED = {2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K"}
# Elements that one thread expands at a time: enough to be worth a thread, few enough to stay near the cache.
_CHUNK = 1 << 21

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output": "lm_head",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Gemma 3 has norms before and after attention and MLP, so that two names mean something else.
_GEMMA3_NAMES = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")


def open_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file of a supported architecture; no tensor data is read yet.

    Raises:
        ModelLoadError: the file is no GGUF, cut off, or holds a storage type that is not supported.
    """
    file = read_gguf(path)
    return Checkpoint(str(file.path), dict(_tensors(file)))


def _tensors(file: GGUFFile) -> Iterator[tuple[str, Tensor]]:
    architecture = file.metadata.get("general.architecture")
    heads = file.metadata.get(f"{architecture}.attention.head_count")
    kv_heads = file.metadata.get(f"{architecture}.attention.head_count_kv", heads)
    # Llama's converter interleaves the two halves of each rotary head; the other families keep the original order.
    interleaved = {"attn_q": heads, "attn_k": kv_heads} if architecture == "llama" else {}
    names = _NAMES | (_GEMMA3_NAMES if architecture == "gemma3" else {})
    # Gemma's norms multiply by 1 + weight; its converter stores the sum.
    norm_offset = -1.0 if architecture == "gemma3" else 0.0

    for name, tensor in file.tensors.items():
        if name == ROPE_FACTORS:
            continue
        stem, _, kind = name.rpartition(".")
        block = _BLOCK.match(stem)
        part = block[2] if block else stem
        known = names.get(part)
        # A name that is not known keeps its own, so that the loader lists it.
        full = name if known is None else f"model.layers.{block[1]}.{known}.{kind}" if block else f"{known}.{kind}"
        count = interleaved.get(part)
        _check(file, full, tensor)
        heads_here = count[int(block[1])] if isinstance(count, list) and block else count
        offset = norm_offset if part.endswith("_norm") else 0.0
        yield full, Tensor(tensor.shape, _PLAIN.get(tensor.type_id, np.dtype(np.float32)), partial(_read, tensor, heads_here, offset))


def _read(tensor: GGUFTensor, interleaved_heads: int | None, offset: float) -> np.ndarray:
    """The values plus `offset`. The rows of so many rotary heads are interleaved: they are put in order before blocks are expanded."""
    rows = _raw_rows(tensor)
    if interleaved_heads:
        rows = _deinterleaved(rows, interleaved_heads)
    if tensor.type_id not in _PLAIN:
        rows = _expand(rows, _QUANTIZED[tensor.type_id], tensor.shape[-1])
    array = rows.reshape(tensor.shape)
    return array + array.dtype.type(offset) if offset else array


def _deinterleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows [heads, D/2, 2] of each head back to [heads, 2, D/2]: first halves, then second ones."""
    split = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


def _check(file: GGUFFile, name: str, tensor: GGUFTensor) -> None:
    """Raise ModelLoadError for a type that cannot be read or data that is not all there."""
    if tensor.type_id not in _PLAIN and tensor.type_id not in _QUANTIZED:
        supported = ", ".join(["F32", "F16", "BF16", *_QUANTIZED.values()])
        raise ModelLoadError(
            f"{file.path}: {name} is stored as {_type_name(tensor.type_id)}; supported: {supported}. A file in one of these types works"
        )
    end = tensor.offset + _bytes_per_row(tensor) * math.prod(tensor.shape[:-1])
    if end > len(tensor.data):
        raise ModelLoadError(f"{file.path} is cut off: {name} ends at byte {end} of {len(tensor.data)}; fetch the file again")


def _type_name(type_id: int) -> str:
    from gguf import GGMLQuantizationType

    return next((kind.name for kind in GGMLQuantizationType if kind == type_id), f"the unknown type {type_id}")


def _block(type_name: str) -> tuple[int, int]:
    """(values, bytes) of one block."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    return GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]


def _bytes_per_row(tensor: GGUFTensor) -> int:
    if tensor.type_id in _PLAIN:
        return tensor.shape[-1] * _PLAIN[tensor.type_id].itemsize
    values, size = _block(_QUANTIZED[tensor.type_id])
    return tensor.shape[-1] // values * size


def _raw_rows(tensor: GGUFTensor) -> np.ndarray:
    """The stored data [rows, values or bytes of a row]; a view of the map. Vectors are columns, so that they can be reordered too."""
    count = math.prod(tensor.shape[:-1])
    plain = _PLAIN.get(tensor.type_id)
    if plain is not None:
        flat = np.frombuffer(tensor.data, plain, math.prod(tensor.shape), tensor.offset)
        return flat.reshape(count, -1) if len(tensor.shape) > 1 else flat
    return np.frombuffer(tensor.data, np.uint8, count * _bytes_per_row(tensor), tensor.offset).reshape(count, -1)


def _expand(rows: np.ndarray, type_name: str, width: int) -> np.ndarray:
    """Blocks to float32 [rows, width], on all cores."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    out = np.empty((len(rows), width), np.float32)
    step = max(1, _CHUNK // width)

    def expand(start: int) -> None:
        out[start : start + step] = dequantize(rows[start : start + step], GGMLQuantizationType[type_name])

    starts = range(0, len(rows), step)
    if len(starts) == 1:
        expand(0)
    else:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(expand, starts))
    return out
