"""Small GGUF files made of Hugging Face tensors, converted as llama.cpp's converter does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

from tests.tiny_tokenizers import byte_level_metadata

WIDTH, MLP, HEADS, KV_HEADS, LAYERS, VOCAB = 64, 128, 4, 2, 2, 258
HEAD_DIM = WIDTH // HEADS

_LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    **{f"self_attn.{x}_proj.{kind}": f"attn_{x}.{kind}" for x in "qkv" for kind in ("weight", "bias")},
}
_NORM_NAMES = {"post_attention_layernorm.weight": "ffn_norm.weight"}
_GEMMA3_NORM_NAMES = {
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
}
_OUTER_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def hf_tensors(architecture: str, *, tied: bool = True, seed: int = 0) -> dict[str, np.ndarray]:
    """Random tensors of a tiny model under Hugging Face names."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    norms = ["input_layernorm", "post_attention_layernorm"]
    if architecture == "gemma3":
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    tensors = {"model.embed_tokens.weight": normal(VOCAB, WIDTH), "model.norm.weight": normal(WIDTH)}
    if not tied:
        tensors["lm_head.weight"] = normal(VOCAB, WIDTH)
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        tensors |= {f"{layer}{norm}.weight": normal(WIDTH) for norm in norms}
        for x, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            tensors[f"{layer}self_attn.{x}_proj.weight"] = normal(heads * HEAD_DIM, WIDTH)
            if architecture == "qwen2":
                tensors[f"{layer}self_attn.{x}_proj.bias"] = normal(heads * HEAD_DIM)
        if architecture in ("qwen3", "gemma3"):
            tensors |= {f"{layer}self_attn.{x}_norm.weight": normal(HEAD_DIM) for x in "qk"}
        tensors[f"{layer}self_attn.o_proj.weight"] = normal(WIDTH, HEADS * HEAD_DIM)
        tensors |= {f"{layer}mlp.{x}_proj.weight": normal(MLP, WIDTH) for x in ("gate", "up")}
        tensors[f"{layer}mlp.down_proj.weight"] = normal(WIDTH, MLP)
    return tensors


def write_gguf(
    path: Path,
    architecture: str = "llama",
    tensors: Mapping[str, np.ndarray] | None = None,
    *,
    stored: str = "F32",
    metadata: Mapping[str, Any] | None = None,
    extra_tensors: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Write `tensors` (named as Hugging Face does), matrices stored as type `stored`, and metadata laid over the usual keys."""
    tensors = hf_tensors(architecture) if tensors is None else tensors
    writer = GGUFWriter(path, architecture)
    keys: dict[str, Any] = {
        f"{architecture}.block_count": LAYERS,
        f"{architecture}.context_length": 128,
        f"{architecture}.embedding_length": WIDTH,
        f"{architecture}.feed_forward_length": MLP,
        f"{architecture}.attention.head_count": HEADS,
        f"{architecture}.attention.head_count_kv": KV_HEADS,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        **({"gemma3.attention.sliding_window": 16, "gemma3.attention.key_length": HEAD_DIM} if architecture == "gemma3" else {}),
        **byte_level_metadata(),
    }
    for key, value in (keys | dict(metadata or {})).items():
        _add(writer, key, value)
    for name, tensor in tensors.items():
        kind = GGMLQuantizationType[stored] if tensor.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(gguf_name(name, architecture), quantize(_converted(name, tensor, architecture), kind), raw_dtype=kind)
    for name, tensor in (extra_tensors or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str, architecture: str) -> str:
    if name in _OUTER_NAMES:
        return _OUTER_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    names = _LAYER_NAMES | (_GEMMA3_NORM_NAMES if architecture == "gemma3" else _NORM_NAMES)
    return f"blk.{layer}.{names[rest]}"


def _converted(name: str, tensor: np.ndarray, architecture: str) -> np.ndarray:
    if architecture == "gemma3" and "norm" in name:
        return tensor + np.float32(1)
    heads = HEADS if "q_proj" in name else KV_HEADS if "k_proj" in name else None
    if architecture == "llama" and heads:
        return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
    return tensor


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
    add[type(value)](key, value)
