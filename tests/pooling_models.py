"""Tiny pooling models on disk, with a tokenizer of whole words that puts [CLS] and [SEP] around texts and pairs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from jaxllm.models.pooling import define_pooling
from tests.runner.pooling import random_checkpoint

WORDS = [
    *("a", "the", "cat", "dog", "sat", "ran", "on", "under", "mat", "tree", "quick", "brown", "fox"),
    *("no", "yes", "sun", "moon", "good", "bad", "film"),
]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
CLS, SEP = 2, 3


def ids_of(text: str) -> list[int]:
    """The ids of a text without special tokens."""
    return [len(SPECIAL) + WORDS.index(word) for word in text.split()]


def write_pooling_model(directory: Path, config: dict[str, Any], *, specials: bool = True) -> Path:
    """Write config.json, the tensors that the model loads, and the tokenizer; with `specials`, as a BERT has it."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = random_checkpoint(define_pooling(config, dtype="float32")).arrays
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config), "utf-8")
    write_word_tokenizer(directory, specials=specials)
    return directory


def write_word_tokenizer(directory: Path, *, specials: bool = True) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocab = {token: i for i, token in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(SPECIAL)
    if specials:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
        )
    tokenizer.save(str(directory / "tokenizer.json"))
    roles = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "eos_token": "[SEP]"}
    template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    (directory / "tokenizer_config.json").write_text(json.dumps({**roles, "chat_template": template}), "utf-8")
