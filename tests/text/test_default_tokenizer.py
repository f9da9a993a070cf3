"""The default model's tokenizer, read out of its GGUF file, against what transformers reads there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxllm.config import ModelConfig
from jaxllm.text.tokenizer import Tokenizer, load_tokenizer
from jaxllm.weights.download import resolve_model

pytestmark = pytest.mark.default_model
GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "default_model_tokens.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def tokenizer(default_model_file) -> Tokenizer:
    return load_tokenizer(resolve_model(ModelConfig(model=str(default_model_file))))


@pytest.mark.parametrize("entry", GOLDEN["texts"], ids=lambda entry: repr(entry["text"][:20]))
def test_ids_are_those_of_transformers(tokenizer, entry):
    assert tokenizer.encode(entry["text"]) == entry["ids"]
    assert tokenizer.decode(entry["ids"]) == entry["text"]


def test_prompts_are_those_of_transformers(tokenizer):
    for chat in GOLDEN["chats"]:
        assert tokenizer.apply_chat_template(chat["messages"]) == chat["prompt"]


def test_streamed_text_is_the_whole_text(tokenizer):
    for entry in GOLDEN["texts"]:
        stream = tokenizer.decode_stream(skip_special_tokens=False)
        deltas = [*(stream.step(token_id) for token_id in entry["ids"]), stream.flush()]
        assert "".join(deltas) == entry["text"]
        assert not any("\ufffd" in delta for delta in deltas)
