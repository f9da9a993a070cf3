"""The bytes that one token stands for in the middle of a text, which `decode` of a single id does not tell: it drops leading spaces
and turns parts of a character into U+FFFD."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte (https://github.com/openai/gpt-2/blob/master/src/encoder.py): character -> byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class PieceDecoder:
    """Bytes of single tokens, by the kind of the tokenizer's decoder: byte-level, SentencePiece with byte fallback, or any other."""

    def __init__(self, backend: Backend):
        self._backend = backend
        kinds = _decoder_kinds(backend)
        self._alphabet = byte_alphabet() if "ByteLevel" in kinds else None
        self._sentencepiece = bool(kinds & {"Metaspace", "ByteFallback", "Replace"})
        self.added = {token_id: token.content for token_id, token in backend.get_added_tokens_decoder().items()}
        self._texts: dict[int, str] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes that an id stands for in the middle of a text; empty beyond the vocabulary."""
        piece = self.added.get(token_id)
        if piece is not None:
            return piece.encode("utf-8", "replace")
        piece = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        if self._alphabet is not None:
            return (
                bytes(self._alphabet[char] for char in piece)
                if all(c in self._alphabet for c in piece)
                else piece.encode("utf-8", "replace")
            )
        if self._sentencepiece:
            byte = _BYTE_PIECE.match(piece)
            return bytes([int(byte[1], 16)]) if byte else piece.replace("▁", " ").encode("utf-8", "replace")
        return self._backend.decode([token_id], skip_special_tokens=False).encode("utf-8", "replace")

    def text_of(self, token_id: int) -> str:
        """`bytes_of` as text, U+FFFD where they are no whole characters."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self.bytes_of(token_id).decode("utf-8", "replace")
        return text


def _decoder_kinds(backend: Backend) -> set[str]:
    """Names of the steps of the backend's decoder."""
    if backend.decoder is None:
        return set()
    state = json.loads(backend.decoder.__getstate__())
    return {step["type"] for step in state.get("decoders", [state])}
