"""Tokenizers of Hugging Face directories: what transformers makes of the same files, without importing it."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
import threading

import pytest

from jaxllm.errors import ConfigError, ModelLoadError
from jaxllm.model_files import ModelFiles
from jaxllm.text.hf_tokenizer import parts_from_directory
from jaxllm.text.tokenizer import Tokenizer, load_tokenizer
from tests.tiny_tokenizers import byte_ids, byte_level

BOS = {"__type": "AddedToken", "content": "<|start|>", "special": True, "normalized": False}
TEXTS = ["", "hello", " in the\n\n", "é 你好 😀", "a<|end|>b<|start|>", "<tool>x"]


@pytest.fixture
def directory(tmp_path):
    """tokenizer.json of a small byte-level BPE, and a tokenizer_config.json that names its end token."""
    byte_level([" the", "in"]).backend.save(str(tmp_path / "tokenizer.json"))
    write_config(tmp_path)
    return tmp_path


def write_config(path, **config):
    values = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "bos_token": BOS} | config
    (path / "tokenizer_config.json").write_text(json.dumps(values))


def load(path):
    return Tokenizer(parts_from_directory(path))


def files(path, **more):
    options = {"kind": "hf", "path": path, "config": {}, "generation_config": {}, "name": "x", "tokenizer_path": path}
    return ModelFiles(**(options | more))


def test_ids_are_those_of_transformers(directory):
    from transformers import AutoTokenizer

    size = len(json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"])
    write_config(directory, added_tokens_decoder={str(size): {"content": "<tool>", "special": False, "normalized": False}})
    ours, theirs = load(directory), AutoTokenizer.from_pretrained(directory)

    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
    assert ours.encode("<tool>") == [size]
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.vocab_size == len(theirs)


def test_files_that_disagree_about_an_id_are_refused(directory):
    write_config(directory, added_tokens_decoder={"9999": {"content": "<tool>", "special": True}})

    with pytest.raises(ModelLoadError, match=r"'<tool>' at id 9999"):
        load(directory)


def test_named_special_tokens_are_special(directory):
    backend = byte_level(["<call>"]).backend
    backend.save(str(directory / "tokenizer.json"))
    write_config(directory, additional_special_tokens=["<call>"])
    tokenizer = load(directory)
    call = tokenizer.token_to_id("<call>")

    assert tokenizer.encode("a<call>") == [*byte_ids("a"), call]
    assert tokenizer.decode([call], skip_special_tokens=True) == ""


def test_loading_imports_neither_transformers_nor_jax(directory):
    code = (
        "import sys; from pathlib import Path; from jaxllm.text.tokenizer import Tokenizer; from jaxllm.text.hf_tokenizer import *;"
        f"t = Tokenizer(parts_from_directory(Path({str(directory)!r}))); t.decode(t.encode('hi'));"
        "print(sorted({'transformers', 'jax', 'torch', 'numpy'} & sys.modules.keys()))"
    )

    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_limits_stored_in_the_file_do_not_cut_prompts(directory):
    backend = byte_level().backend
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(directory / "tokenizer.json"))

    assert len(load(directory).encode("x" * 100)) == 100


def test_files_without_tokenizer_json_go_through_transformers(tmp_path, directory):
    model = json.loads((directory / "tokenizer.json").read_text())["model"]
    old = tmp_path / "old"
    old.mkdir()
    (old / "vocab.json").write_text(json.dumps(model["vocab"]))
    (old / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(merge) for merge in model["merges"]))
    (old / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|end|>"}))
    (old / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    tokenizer = load(old)

    assert tokenizer.encode("in the") == load(directory).encode("in the")
    assert tokenizer.decode(tokenizer.encode("in the 你")) == "in the 你"


def test_a_directory_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ModelLoadError, match=r"holds no tokenizer\.json"):
        load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="cannot be read as a tokenizer"):
        load(tmp_path)


# ---------------------------------------------------------------- chat templates


def test_a_template_file_wins_over_the_config(directory):
    write_config(directory, chat_template="config")
    assert load(directory).chat_template == "config"

    (directory / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert load(directory).chat_template == "json"

    (directory / "chat_template.jinja").write_text("jinja")
    assert load(directory).chat_template == "jinja"


def test_named_templates_are_found(directory):
    write_config(directory, chat_template=[{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}])
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "rag.jinja").write_text("C")
    tokenizer = load(directory)
    user = [{"role": "user", "content": "x"}]

    assert tokenizer.apply_chat_template(user) == "A"
    assert tokenizer.apply_chat_template(user, [{}]) == "B"
    assert tokenizer.apply_chat_template(user, chat_template="rag") == "C"


def test_the_users_template_replaces_the_models(directory):
    write_config(directory, chat_template="model's {{ eos_token }}")

    assert load_tokenizer(files(directory)).apply_chat_template([{"role": "user", "content": "x"}]) == "model's <|end|>"
    given = load_tokenizer(files(directory, chat_template="mine {{ bos_token }}"))
    assert given.apply_chat_template([{"role": "user", "content": "x"}]) == "mine <|start|>"
    with pytest.raises(ConfigError, match="does not compile"):
        load_tokenizer(files(directory, chat_template="{% if %}"))


def test_a_public_tokenizer_gives_the_ids_of_transformers(conformance_data, tmp_path):
    from transformers import AutoTokenizer

    source = conformance_data / "tokenizers" / "deepseek_r1"
    with gzip.open(source / "tokenizer.json.gz") as packed, (tmp_path / "tokenizer.json").open("wb") as file:
        shutil.copyfileobj(packed, file)
    shutil.copy(source / "tokenizer_config.json", tmp_path)
    ours, theirs = load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    chat = [
        {"role": "user", "content": "Hi 你好"},
        {"role": "assistant", "content": "<think>x</think>Yes"},
        {"role": "user", "content": "?"},
    ]

    for text in [*TEXTS, "x = 12345 + ½; naïve café\r\n", "日本語テキスト"]:
        assert ours.encode(text) == theirs.encode(text)
    assert ours.apply_chat_template(chat) == theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)


def test_a_long_text_does_not_hold_up_other_threads(directory):
    encoding = threading.Thread(target=load(directory).encode, args=("some words " * 100_000,))
    encoding.start()
    turns = 0
    while encoding.is_alive():
        turns += 1
    assert turns > 1000, "one long call"
