"""Tiny Hugging Face directories for tests: random ones by a numpy recipe, and models that say what a test wants.

Nothing here needs torch. The random recipe is the contract between the tests and `scripts/make_golden.py`: the tensors of
`random_tensors(config, seed)` are the same on every machine, so only the outputs that transformers gave for them are committed.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jaxllm.weights.checkpoint import Checkpoint, Tensor

# --------------------------------------------------------------------------- configs


def tiny_config(architecture: str = "LlamaForCausalLM", **changes: Any) -> dict[str, Any]:
    """A complete tiny config.json of the architecture (2 layers, width 32, 4 heads, 2 KV heads); None removes a key."""
    if architecture == "GPT2LMHeadModel":
        config: dict[str, Any] = {
            "architectures": [architecture], "model_type": "gpt2", "vocab_size": 128, "n_embd": 32, "n_layer": 2, "n_head": 4,
            "n_positions": 256, "n_inner": None, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0, "dtype": "float32",
        }  # fmt: skip
    else:
        model_type = {
            "LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3",
            "Gemma3ForCausalLM": "gemma3_text",
        }[architecture]  # fmt: skip
        config = {
            "architectures": [architecture], "model_type": model_type, "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "hidden_act": "silu",
            "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
            "bos_token_id": 0, "eos_token_id": 0, "dtype": "float32",
        }  # fmt: skip
        if architecture == "MistralForCausalLM":
            config["sliding_window"] = None
        if architecture == "Qwen2ForCausalLM":
            del config["head_dim"]
        if architecture == "Gemma3ForCausalLM":
            del config["hidden_act"]
            config |= {
                "num_hidden_layers": 6, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 16, "sliding_window": 16,
                "sliding_window_pattern": 3, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "tie_word_embeddings": True,
            }  # fmt: skip
    config |= changes
    return {key: value for key, value in config.items() if value is not None or key in ("sliding_window", "n_inner")}


# --------------------------------------------------------------------------- tensors


# Model types that this table knows; other cases come with the names that transformers gave them.
TABLED = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "gpt2")


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes that transformers gives the architecture's checkpoint, in order."""
    return _gpt2_shapes(config) if config["model_type"] == "gpt2" else _llama_like_shapes(config)


def random_tensors(config: Mapping[str, Any], seed: int = 0, shapes: Mapping[str, tuple[int, ...]] | None = None) -> dict[str, np.ndarray]:
    """float32 tensors: matrices N(0, 1.5 / sqrt(in)), embeddings N(0, 1) (0.3 where tied), norms N(1, 0.2), biases N(0, 0.3).

    `shapes` has the names where `tensor_shapes` does not know them.

    Each tensor has a generator of its own, seeded by (seed, crc32 of its name). The scales are large enough that attention matters to
    the logits, so that an error in a window or a rotation shows.
    """
    tensors = {name: _random_tensor(name, tuple(shape), seed) for name, shape in (shapes or tensor_shapes(config)).items()}
    if not any(name.startswith(_HEADS) for name in tensors):
        # Otherwise a tied model repeats its last token for ever.
        embedding = next(name for name in tensors if any(part in name for part in _TABLES))
        tensors[embedding] *= np.float32(0.3)
    return tensors


_HEADS = ("lm_head.", "embed_out.", "output.")
_TABLES = ("shared.weight", "embed_tokens", "embeddings.", "wte", "word_embeddings.", "embed_in", "tok_embeddings")


def _random_tensor(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    values = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(shape)
    if not shape:
        values = np.array(-1e-6 if name.endswith("eps") else 0.5)
    elif name.endswith("A_log"):
        values = 0.5 * values - 2  # remembers tens of positions
    elif name.endswith("bias"):
        values = 0.3 * values
    elif len(shape) == 1 or "norm" in name or ".ln_" in name:
        values = 1 + 0.2 * values
    elif "embed" in name or name.endswith("shared.weight") or ".wte." in name or ".wpe." in name:
        pass
    else:
        fan_in = shape[0] if ".c_" in name else shape[1]
        values = 1.5 * fan_in**-0.5 * values
    if "encoder_attn.out_proj" in name:
        # What an encoder says is much the same for all tokens: as loud as they are, it would make them all alike behind a norm.
        values = 0.3 * values
    return values.astype(np.float32)


def _llama_like_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    kind, width, vocab = config["model_type"], config["hidden_size"], config["vocab_size"]
    mlp, heads = config["intermediate_size"], config["num_attention_heads"]
    kv_heads, dim = config.get("num_key_value_heads", heads), config.get("head_dim") or width // heads
    qkv_bias = kind == "qwen2" or config.get("attention_bias", False)
    out_bias, mlp_bias = config.get("attention_bias", False), config.get("mlp_bias", False)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, width)}

    def linear(name: str, out: int, inputs: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = (out, inputs)
        if bias:
            shapes[f"{name}.bias"] = (out,)

    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes[f"{layer}.input_layernorm.weight"] = (width,)
        linear(f"{layer}.self_attn.q_proj", heads * dim, width, qkv_bias)
        linear(f"{layer}.self_attn.k_proj", kv_heads * dim, width, qkv_bias)
        linear(f"{layer}.self_attn.v_proj", kv_heads * dim, width, qkv_bias)
        linear(f"{layer}.self_attn.o_proj", width, heads * dim, out_bias)
        if kind in ("qwen3", "gemma3_text"):
            shapes[f"{layer}.self_attn.q_norm.weight"] = shapes[f"{layer}.self_attn.k_norm.weight"] = (dim,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (width,)
        if kind == "gemma3_text":
            shapes[f"{layer}.pre_feedforward_layernorm.weight"] = (width,)
            shapes[f"{layer}.post_feedforward_layernorm.weight"] = (width,)
        linear(f"{layer}.mlp.gate_proj", mlp, width, mlp_bias)
        linear(f"{layer}.mlp.up_proj", mlp, width, mlp_bias)
        linear(f"{layer}.mlp.down_proj", width, mlp, mlp_bias)
    shapes["model.norm.weight"] = (width,)
    if not config.get("tie_word_embeddings", False):
        shapes["lm_head.weight"] = (vocab, width)
    return shapes


def _gpt2_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    width, vocab = config["n_embd"], config["vocab_size"]
    mlp = config.get("n_inner") or 4 * width
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (vocab, width),
        "transformer.wpe.weight": (config["n_positions"], width),
    }
    for i in range(config["n_layer"]):
        layer = f"transformer.h.{i}"
        for name, shape in (
            ("ln_1", (width,)), ("attn.c_attn", (width, 3 * width)), ("attn.c_proj", (width, width)),
            ("ln_2", (width,)), ("mlp.c_fc", (width, mlp)), ("mlp.c_proj", (mlp, width)),
        ):  # fmt: skip
            shapes[f"{layer}.{name}.weight"] = shape
            shapes[f"{layer}.{name}.bias"] = shape[-1:]
    shapes["transformer.ln_f.weight"] = shapes["transformer.ln_f.bias"] = (width,)
    if not config.get("tie_word_embeddings", True):
        shapes["lm_head.weight"] = (vocab, width)
    return shapes


# --------------------------------------------------------------------------- directories


def write_model(
    directory: Path,
    config: Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
    tensors: Mapping[str, np.ndarray] | None = None,
    num_shards: int = 1,
    tokenizer: bool = True,
) -> Path:
    """Write config.json, safetensors (sharded with an index where num_shards > 1) and a tokenizer; returns the directory."""
    config = tiny_config() if config is None else dict(config)
    tensors = random_tensors(config, seed) if tensors is None else dict(tensors)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1), "utf-8")
    if num_shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    else:
        names, weight_map = list(tensors), {}
        for shard in range(num_shards):
            file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
            part = {name: tensors[name] for name in names[shard::num_shards]}
            save_file(part, directory / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(part, file)
        index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    if tokenizer:
        write_tokenizer(directory, config["vocab_size"])
    return directory


class MemoryCheckpoint(Checkpoint):
    """A checkpoint of arrays, remembering which were read."""

    def __init__(self, arrays: Mapping[str, np.ndarray]):
        self.arrays, self.reads = dict(arrays), list[str]()
        super().__init__(
            "memory", {name: Tensor(array.shape, array.dtype, partial(self._read, name, array)) for name, array in arrays.items()}
        )

    def _read(self, name: str, array: np.ndarray) -> np.ndarray:
        self.reads.append(name)
        return array


CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL_TOKENS = ("<|eos|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
# Ids of the 256 bytes start here.
FIRST_BYTE_ID = len(SPECIAL_TOKENS)


def write_tokenizer(directory: Path, vocab_size: int = 512, words: Sequence[str] = ()) -> None:
    """Write tokenizer.json and tokenizer_config.json of a byte-level BPE.

    Ids: the special tokens (0 is end of sequence), the 256 bytes in order, then `words` as further ordinary tokens (as many as fit the
    model; a word longer than one byte is reached by id only, no merges lead to it). With a vocab_size below 261 the last bytes are
    missing and their characters cannot be encoded.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = byte_alphabet()
    pieces = [*alphabet, *("".join(alphabet[b] for b in word.encode()) for word in words)]
    vocab = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *pieces][:vocab_size])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL_TOKENS[0], "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000, "chat_template": CHAT_TEMPLATE,
    }  # fmt: skip
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")


def byte_alphabet() -> list[str]:
    """The printable character that byte-level BPE writes for each byte (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in printable]
    return [chr(b) if b in printable else chr(256 + others.index(b)) for b in range(256)]


# --------------------------------------------------------------------------- models that say what you want


def write_scripted_model(
    directory: Path,
    script: str | Sequence[int | str],
    *,
    start: int = 1,
    words: Sequence[str] = (),
    vocab_size: int = 512,
    max_positions: int = 4096,
    runner_up: int | None = None,
) -> Path:
    """Write a GPT-2 that emits the script greedily, whatever the prompt says: the token after position p is script[p - start + 1].

    With a prompt of `start` tokens the output is the script from its first token. A script text is spelt in bytes; a list mixes token
    ids and strings (each of `words` is one token, anything else is spelt in bytes). After the script comes end of sequence (id 0) for
    ever. Attention and MLP are zero and every hidden state is the code of one token, so a scripted token has a log-probability of
    almost 0; `runner_up` names a token that is second everywhere.

    Returns:
        The directory, with a tokenizer whose ids are those of `write_tokenizer(directory, vocab_size, words)`.
    """
    ids = script_ids(script, words)
    if ids and max(ids) >= vocab_size:
        raise ValueError(f"script token {max(ids)} is not below vocab_size {vocab_size}")
    # Codes are random directions: two of the same width 128 are nearly orthogonal, so the scripted token wins by a wide margin.
    width = 128
    codes = np.random.default_rng(0).choice(np.array([-1.0, 1.0], np.float32), (vocab_size, width))
    codes -= codes.mean(axis=1, keepdims=True)
    codes /= codes.std(axis=1, keepdims=True)
    positions = codes[[ids[p - start + 1] if 0 <= p - start + 1 < len(ids) else 0 for p in range(max_positions)]]
    config = tiny_config(
        "GPT2LMHeadModel", vocab_size=vocab_size, n_embd=width, n_layer=1, n_head=2, n_positions=max_positions, n_inner=2,
        tie_word_embeddings=False,
    )  # fmt: skip
    tensors = {name: np.zeros(shape, np.float32) for name, shape in tensor_shapes(config).items()}
    for name in tensors:
        if ".ln_" in name and name.endswith("weight"):
            tensors[name] += 1
    head = codes / 4
    if runner_up is not None:
        # A constant share of every hidden state along one direction that only the runner-up's row looks at.
        tensors["transformer.ln_f.bias"] = codes[runner_up] * 0.25
    tensors["transformer.wpe.weight"], tensors["lm_head.weight"] = positions, head.astype(np.float32)
    write_model(directory, config, tensors=tensors, tokenizer=False)
    write_tokenizer(directory, vocab_size, words)
    return directory


def script_ids(script: str | Sequence[int | str], words: Sequence[str] = ()) -> list[int]:
    """The token ids of a script (see `write_scripted_model`)."""
    ids: list[int] = []
    for part in [script] if isinstance(script, str) else script:
        if isinstance(part, int):
            ids.append(part)
        elif part in words:
            ids.append(FIRST_BYTE_ID + 256 + list(words).index(part))
        else:
            ids.extend(FIRST_BYTE_ID + byte for byte in part.encode())
    return ids
