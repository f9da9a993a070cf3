"""Small tokenizers of the two kinds that matter, built in memory: byte-level BPE, and SentencePiece BPE with byte fallback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxllm.text.gguf_tokenizer import parts_from_gguf
from jaxllm.text.token_bytes import byte_alphabet
from jaxllm.text.tokenizer import Tokenizer

SPECIAL = ("<|end|>", "<|start|>")
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6


def byte_level_metadata(words: Sequence[str] = (), *, pre: str = "gpt-2", **more: Any) -> dict[str, Any]:
    """GGUF metadata: ids 0 and 1 are special, 2..257 the bytes in order, then the words (any text, spaces included) and their parts."""
    letters = {byte: char for char, byte in byte_alphabet().items()}
    tokens = [*SPECIAL, *(letters[byte] for byte in range(256))]
    merges: list[str] = []
    for word in words:
        chars = [letters[byte] for byte in word.encode()]
        for end in range(2, len(chars) + 1):
            left, right = "".join(chars[: end - 1]), chars[end - 1]
            if left + right not in tokens:
                tokens.append(left + right)
                merges.append(f"{left} {right}")
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [_CONTROL] * len(SPECIAL) + [_NORMAL] * (len(tokens) - len(SPECIAL)),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        **more,
    }


def sentencepiece_metadata(pieces: Sequence[str], **more: Any) -> dict[str, Any]:
    """GGUF metadata: <unk> <s> </s>, 256 byte tokens (ids 3..258), then `pieces`, the earlier the likelier. Spell spaces as ▁."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(pieces))],
        "tokenizer.ggml.token_type": [_UNKNOWN, _CONTROL, _CONTROL, *[_BYTE] * 256, *[_NORMAL] * len(pieces)],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **more,
    }


def byte_level(words: Sequence[str] = (), **more: Any) -> Tokenizer:
    return Tokenizer(parts_from_gguf(byte_level_metadata(words, **more), source="test"))


def sentencepiece(pieces: Sequence[str], **more: Any) -> Tokenizer:
    return Tokenizer(parts_from_gguf(sentencepiece_metadata(pieces, **more), source="test"))


def byte_ids(text: str | bytes, *, first: int = 2) -> list[int]:
    """Ids of single bytes: `first` is 2 for `byte_level`, 3 for `sentencepiece`."""
    return [byte + first for byte in (text.encode() if isinstance(text, str) else text)]
