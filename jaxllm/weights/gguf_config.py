"""GGUF metadata -> the Hugging Face config (and generation config) of the same model, for the architectures whose tensors we can name."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from typing import Any

from jaxllm.errors import ModelLoadError
from jaxllm.weights.gguf_file import GGUFFile

# The tensor of Llama 3's rotary scaling: what each frequency is divided by.
ROPE_FACTORS = "rope_freqs.weight"

# Generation defaults that newer files carry: GGUF key -> Hugging Face name.
_SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def config_from_gguf(file: GGUFFile) -> dict[str, Any]:
    """The Hugging Face config of the model in `file`.

    Raises:
        ModelLoadError: an architecture or a feature of one that is not supported, or a missing key; the message names it.
    """
    architecture = file.metadata.get("general.architecture")
    if architecture not in _FAMILIES:
        raise ModelLoadError(
            f"{file.path}: GGUF architecture {architecture!r} is not supported; supported: {', '.join(sorted(_FAMILIES))}. "
            "The model's Hugging Face directory may work"
        )
    config = _FAMILIES[architecture](_Keys(file, architecture))
    ids = {name: file.metadata.get(f"tokenizer.ggml.{name}") for name in ("bos_token_id", "eos_token_id")}
    return config | {name: value for name, value in ids.items() if value is not None}


def generation_config_from_gguf(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Generation defaults in a file: its end-of-sequence ids and, where present, sampling defaults."""
    generation: dict[str, Any] = {ours: metadata[key] for key, ours in _SAMPLING.items() if key in metadata}
    ids = [
        metadata[f"tokenizer.ggml.{key}"] for key in ("eos_token_id", "eot_token_id", "eom_token_id") if f"tokenizer.ggml.{key}" in metadata
    ]
    if ids:
        generation["eos_token_id"] = list(dict.fromkeys(ids))
    return generation


class _Keys:
    """The metadata of one architecture: `keys("block_count")` is `llama.block_count`."""

    def __init__(self, file: GGUFFile, architecture: str):
        self.file = file
        self.architecture = architecture

    def __call__(self, key: str) -> Any:
        full = f"{self.architecture}.{key}"
        if full not in self.file.metadata:
            raise ModelLoadError(f"{self.file.path} has no metadata key {full}, which a {self.architecture} model needs")
        return self.file.metadata[full]

    def get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{key}", default)

    def has_tensor(self, name: str) -> bool:
        return name in self.file.tensors


def _decoder(keys: _Keys, architecture: str, model_type: str) -> dict[str, Any]:
    """What all families share."""
    if keys.get("expert_count", 0):
        raise ModelLoadError(f"{keys.file.path}: mixture-of-experts models ({keys.get('expert_count')} experts) are not supported in GGUF")
    heads, kv_heads, ffn = (_uniform(keys, name) for name in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"))
    width = keys("embedding_length")
    head_dim = keys.get("attention.key_length", width // heads)
    if keys.get("attention.value_length", head_dim) != head_dim or keys.get("rope.dimension_count", head_dim) != head_dim:
        raise ModelLoadError(
            f"{keys.file.path}: value heads or a rotary part that differ from the key head size {head_dim} are not supported"
        )
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": width,
        "intermediate_size": ffn,
        "num_hidden_layers": keys("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": keys("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.get("rope.freq_base", 10_000.0),
        "max_position_embeddings": keys("context_length"),
        "vocab_size": _vocab_size(keys),
        "tie_word_embeddings": not keys.has_tensor("output.weight"),
        "torch_dtype": _stored_dtype(keys),
    }
    scaling = _rope_scaling(keys)
    return config | ({"rope_scaling": scaling} if scaling else {})


def _llama(keys: _Keys) -> dict[str, Any]:
    return _decoder(keys, "LlamaForCausalLM", "llama") | {
        "hidden_act": "silu",
        "attention_bias": keys.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": keys.has_tensor("blk.0.ffn_gate.bias"),
    }


def _qwen2(keys: _Keys) -> dict[str, Any]:
    return _decoder(keys, "Qwen2ForCausalLM", "qwen2") | {"hidden_act": "silu", "use_sliding_window": False}


def _qwen3(keys: _Keys) -> dict[str, Any]:
    return _decoder(keys, "Qwen3ForCausalLM", "qwen3") | {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False}


# Every sixth layer of Gemma 3 sees everything. The pattern, the base of the local layers' rotation and the score scale of the
# 27B model are not in the metadata; they are the same in all released models.
_GEMMA3_PATTERN = 6
_GEMMA3_LOCAL_THETA = 10_000.0
_GEMMA3_27B_LAYERS = 62


def _gemma3(keys: _Keys) -> dict[str, Any]:
    config = _decoder(keys, "Gemma3ForCausalLM", "gemma3_text")
    layers = config["num_hidden_layers"]
    pattern = keys.get("attention.sliding_window_pattern", _GEMMA3_PATTERN)
    if not isinstance(pattern, int):
        raise ModelLoadError(f"{keys.file.path}: a sliding-window pattern given as a list is not supported for gemma3")
    wide = layers == _GEMMA3_27B_LAYERS
    return config | {
        "rope_theta": keys.get("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": keys.get("rope.freq_base_swa", _GEMMA3_LOCAL_THETA),
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": keys("attention.sliding_window"),
        "layer_types": ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(layers)],
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"] if wide else config["head_dim"],
        "attn_logit_softcapping": None,
        "final_logit_softcapping": keys.get("final_logit_softcapping"),
        "attention_bias": False,
    }


_FAMILIES: dict[str, Callable[[_Keys], dict[str, Any]]] = {"llama": _llama, "qwen2": _qwen2, "qwen3": _qwen3, "gemma3": _gemma3}


def _uniform(keys: _Keys, name: str) -> int:
    """A size that may be given once or per layer; layers of different sizes are refused."""
    value = keys.get(name)
    if value is None:
        value = keys("attention.head_count") if name == "attention.head_count_kv" else keys(name)
    sizes = set(value) if isinstance(value, list) else {value}
    if len(sizes) != 1:
        raise ModelLoadError(
            f"{keys.file.path}: {keys.architecture}.{name} differs between layers ({sorted(sizes)}), which is not supported"
        )
    return int(sizes.pop())


def _vocab_size(keys: _Keys) -> int:
    embedding = keys.file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelLoadError(f"{keys.file.path} has no tensor token_embd.weight: it holds a vocabulary and no model")
    return embedding.shape[0]


# ggml's numbers of the storage types that are computed in the type they are stored in; quantized ones become float32.
_PLAIN_DTYPES = {1: "float16", 30: "bfloat16"}


def _stored_dtype(keys: _Keys) -> str:
    tensor = keys.file.tensors.get("blk.0.attn_q.weight")
    return _PLAIN_DTYPES.get(tensor.type_id, "float32") if tensor else "float32"


def _rope_scaling(keys: _Keys) -> dict[str, Any] | None:
    """Rotary scaling, out of metadata or out of the tensor of factors."""
    if keys.has_tensor(ROPE_FACTORS):
        return _factors_as_scaling(keys)
    kind = keys.get("rope.scaling.type", "none")
    factor = keys.get("rope.scaling.factor", 1.0)
    if kind == "none" or factor in (0.0, 1.0):
        # Files older than `rope.scaling.type` name a linear factor alone.
        linear = keys.get("rope.scale_linear", 1.0)
        return None if linear in (0.0, 1.0) else {"rope_type": "linear", "factor": linear}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = keys.get("rope.scaling.original_context_length", keys("context_length"))
        scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        for name in ("beta_fast", "beta_slow"):
            if (value := keys.get(f"rope.scaling.yarn_{name}")) is not None:
                scaling[name] = value
        if (multiplier := keys.get("rope.scaling.attn_factor", 1.0)) != 1.0:
            # GGUF keeps what multiplies YaRN's own magnitude, a Hugging Face config the product.
            scaling["attention_factor"] = multiplier * (1 + 0.1 * math.log(factor))
        return scaling
    raise ModelLoadError(f"{keys.file.path}: rotary scaling {kind!r} is not supported in GGUF; supported: linear, yarn")


def _factors_as_scaling(keys: _Keys) -> dict[str, Any]:
    """Factors per frequency as the scaling that reads such a list: longrope, with one list for all lengths and magnitudes untouched."""
    tensor = keys.file.tensors[ROPE_FACTORS]
    factors = list(struct.unpack_from(f"<{tensor.shape[0]}f", tensor.data, tensor.offset))
    return {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
