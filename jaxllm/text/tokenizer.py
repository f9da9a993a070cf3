"""The tokenizer of a model: text to token ids and back, and chats to prompts. Loads without transformers, which takes seconds to import."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jaxllm.model_files import ModelFiles
from jaxllm.text.chat_template import ChatTemplates
from jaxllm.text.decode_stream import REPLACEMENT, TextStream
from jaxllm.text.token_bytes import PieceDecoder

if TYPE_CHECKING:
    from tokenizers import Encoding
    from tokenizers import Tokenizer as Backend


@dataclass(frozen=True)
class TokenizerParts:
    """What a tokenizer is made of, whatever file it came from.

    `special_tokens` maps roles ("bos_token", "eos_token", "pad_token", …) to their text; `chat_templates` names ("default",
    "tool_use") to templates.
    """

    backend: Backend
    special_tokens: Mapping[str, str]
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    clean_up_tokenization_spaces: bool = False


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """The tokenizer of a resolved model.

    Raises:
        ModelLoadError: the files hold none, or one of a kind that is not supported.
    """
    if files.gguf_metadata is not None:
        from jaxllm.text.gguf_tokenizer import parts_from_gguf

        parts = parts_from_gguf(files.gguf_metadata, source=str(files.tokenizer_path))
    else:
        from jaxllm.text.hf_tokenizer import parts_from_directory

        parts = parts_from_directory(files.tokenizer_path)
    return Tokenizer(parts, chat_template=files.chat_template)


class Tokenizer:
    """One model's tokenizer. `chat_template` replaces the tokenizer's own.

    Raises:
        ConfigError: `chat_template` does not compile.
    """

    def __init__(self, parts: TokenizerParts, *, chat_template: str | None = None):
        self.backend = parts.backend
        self.backend.no_truncation()
        self.backend.no_padding()
        self.special_tokens = dict(parts.special_tokens)
        self._parts = parts
        templates = {"default": chat_template} if chat_template is not None else parts.chat_templates
        self._templates = ChatTemplates(templates, self.special_tokens)
        self.apply_chat_template = self._templates.render
        if chat_template is not None:
            self._templates.check()
        pieces = PieceDecoder(parts.backend)
        # Tokens that are matched before the model sees the text: id -> text.
        self.added_tokens = pieces.added
        self.token_bytes, self.token_text = pieces.bytes_of, pieces.text_of

    # ---------------------------------------------------------------- ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written out in it are recognised."""
        return self._encoding(text, add_special_tokens).ids

    def _encoding(self, text: str, add_special_tokens: bool) -> Encoding:
        """Not by the backend's `encode`: it holds up all threads, and takes longer, since it finds each token's place in the text."""
        return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]

    def encode_cut(
        self, text: str, second: str | None = None, *, limit: int | None, side: str = "right", add_special_tokens: bool = True
    ) -> tuple[list[int], int | None]:
        """Token ids of a text, or of a pair as one input, of at most `limit` tokens; and the index from which token types are 1.

        Special tokens are kept. Of a pair, the longer text is cut before the shorter (transformers' "longest_first").
        """
        parts = [self._encoding(part, False) for part in (text, second) if part is not None]
        if limit is not None:
            special = self.backend.num_special_tokens_to_add(len(parts) == 2) if add_special_tokens else 0
            for part, length in zip(parts, _lengths_within([len(part) for part in parts], max(0, limit - special)), strict=True):
                part.truncate(length, direction=side)
        whole = self.backend.post_process(parts[0], parts[1] if second is not None else None, add_special_tokens)
        return whole.ids, whole.type_ids.index(1) if 1 in whole.type_ids else None

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of `token_ids`; ids beyond the vocabulary give nothing."""
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def decode_stream(self, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True) -> TextStream:
        """A stream that decodes what follows `prompt_token_ids`."""
        return TextStream(self.backend, prompt_token_ids, skip_special_tokens=skip_special_tokens)

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the highest id that decodes to something."""
        count = self.backend.get_vocab_size(with_added_tokens=True)
        if self.backend.id_to_token(count - 1) is not None and self.backend.id_to_token(count) is None:
            return count
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of an id (`Ġthe`, `▁the`, `<0x0A>`), None beyond the vocabulary."""
        return self.backend.id_to_token(token_id)

    def token_to_id(self, token: str) -> int | None:
        return self.backend.token_to_id(token)

    # ---------------------------------------------------------------- special tokens

    @functools.cached_property
    def all_special_ids(self) -> list[int]:
        """Ids of the tokens that `skip_special_tokens` leaves out."""
        return [token_id for token_id, token in self.backend.get_added_tokens_decoder().items() if token.special]

    def _special_id(self, role: str) -> int | None:
        text = self.special_tokens.get(role)
        return None if text is None else self.backend.token_to_id(text)

    @property
    def bos_token_id(self) -> int | None:
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._special_id("eos_token")

    # ---------------------------------------------------------------- chats

    @property
    def chat_template(self) -> str | None:
        """The template that a chat without tools is rendered with; None where the model has none."""
        return self._templates.default

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """All templates of the model by name, those for special occasions ("tool_use") included."""
        return self._templates.templates

    # ---------------------------------------------------------------- transformers

    @functools.cached_property
    def hf(self) -> Any:
        """The same tokenizer as a transformers PreTrainedTokenizerFast (imports transformers)."""
        from transformers import PreTrainedTokenizerFast

        templates = dict(self._templates.templates)
        hf = PreTrainedTokenizerFast(
            tokenizer_object=self.backend,
            clean_up_tokenization_spaces=self._parts.clean_up_tokenization_spaces,
            **self.special_tokens,
        )
        hf.chat_template = templates["default"] if list(templates) == ["default"] else templates or None
        return hf


def _lengths_within(lengths: list[int], room: int) -> list[int]:
    """Lengths of one text or two that come to at most `room`, taken from the longer one first."""
    if len(lengths) == 1:
        return [min(lengths[0], room)]
    if sum(lengths) <= room:
        return lengths
    shorter = min(*lengths, room // 2)
    return [shorter, room - shorter] if lengths[0] <= lengths[1] else [room - shorter, shorter]


__all__ = ["REPLACEMENT", "TextStream", "Tokenizer", "TokenizerParts", "load_tokenizer"]
