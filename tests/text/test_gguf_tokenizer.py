"""Tokenizers out of GGUF metadata: the same ids as the models' own tokenizers."""

from __future__ import annotations

import json

import pytest

from jaxllm.errors import ModelLoadError
from jaxllm.text.gguf_tokenizer import parts_from_gguf
from jaxllm.text.pretokenizers import PRE_TOKENIZERS
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.weights.gguf_file import read_gguf
from tests.tiny_tokenizers import byte_ids, byte_level, byte_level_metadata, sentencepiece, sentencepiece_metadata

PIECES = ["▁", "a", "b", "c", "ab", "▁a", "▁ab", "bc", "abc"]


def load(metadata):
    return Tokenizer(parts_from_gguf(metadata, source="test.gguf"))


def test_byte_level_text_is_merged_and_comes_back():
    tokenizer = byte_level([" the", "the"])

    assert [tokenizer.id_to_token(i) for i in tokenizer.encode("the the thé")] == ["the", "Ġthe", "Ġth", "Ã", "©"]
    assert tokenizer.decode(tokenizer.encode("the the thé\n")) == "the the thé\n"


def test_control_tokens_in_text_are_recognised_and_skipped():
    tokenizer = byte_level()

    assert tokenizer.encode("a<|end|>") == [*byte_ids("a"), 0]
    assert tokenizer.decode([*byte_ids("a"), 0], skip_special_tokens=True) == "a"
    assert tokenizer.all_special_ids == [0, 1]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 0)


def test_user_defined_tokens_are_recognised_and_shown():
    metadata = byte_level_metadata(["<tool>"])
    metadata["tokenizer.ggml.token_type"][-1] = 4
    tokenizer = load(metadata)
    tool = tokenizer.vocab_size - 1

    assert tokenizer.encode("x<tool>y") == [*byte_ids("x"), tool, *byte_ids("y")]
    assert tokenizer.decode([tool], skip_special_tokens=True) == "<tool>"


@pytest.mark.parametrize(
    ("pre", "given", "begins"),
    [("gpt-2", None, False), ("llama-bpe", None, True), ("llama-bpe", False, False), ("gpt-2", True, True)],
)
def test_texts_begin_with_bos_as_the_file_or_else_the_kind_says(pre, given, begins):
    more = {} if given is None else {"tokenizer.ggml.add_bos_token": given}
    tokenizer = byte_level(pre=pre, **more)

    assert tokenizer.encode("a") == ([1] if begins else []) + byte_ids("a")
    assert tokenizer.encode("a", add_special_tokens=False) == byte_ids("a")


def test_texts_end_with_eos_where_the_file_says_so():
    assert byte_level(**{"tokenizer.ggml.add_eos_token": True}).encode("a") == [*byte_ids("a"), 0]


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_kind_of_cut_keeps_the_text(pre):
    tokenizer = byte_level(["12", "123", " the"], pre=pre)
    text = "I'LL pay  $1234.50\r\n\n\tfor the 你好, naïve—😀 ½ "

    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_digits_are_cut_as_the_kind_says():
    def pieces(pre):
        tokenizer = byte_level(["1234"], pre=pre)
        return [tokenizer.id_to_token(i) for i in tokenizer.encode("1234", add_special_tokens=False)]

    assert pieces("gpt-2") == ["1234"]
    assert pieces("llama-bpe") == ["123", "4"]
    assert pieces("smollm") == pieces("qwen2") == ["1", "2", "3", "4"]


def test_a_kind_that_is_not_known_is_refused():
    with pytest.raises(ModelLoadError, match=r"pre-tokenizer 'new-one' is not supported; supported: .*llama-bpe"):
        load(byte_level_metadata(pre="new-one"))
    with pytest.raises(ModelLoadError, match="tokenizer of kind 't5'"):
        load({**byte_level_metadata(), "tokenizer.ggml.model": "t5"})
    with pytest.raises(ModelLoadError, match="holds no tokenizer"):
        load({})


def test_sentencepiece_merges_the_best_scored_neighbours():
    tokenizer = sentencepiece(PIECES)

    assert [tokenizer.id_to_token(i) for i in tokenizer.encode("abc abc", add_special_tokens=False)] == ["▁ab", "c", "▁ab", "c"]


def test_sentencepiece_falls_back_to_bytes_and_drops_the_first_space():
    tokenizer = sentencepiece(PIECES)
    ids = tokenizer.encode("abé")

    assert ids == [1, tokenizer.token_to_id("▁ab"), *byte_ids("é", first=3)]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "abé"


def test_sentencepiece_without_a_space_prefix_adds_none():
    tokenizer = sentencepiece(PIECES, **{"tokenizer.ggml.add_space_prefix": False})

    assert [tokenizer.id_to_token(i) for i in tokenizer.encode("ab ab", add_special_tokens=False)] == ["ab", "▁ab"]
    assert tokenizer.decode(tokenizer.encode(" ab", add_special_tokens=False)) == " ab"


@pytest.mark.parametrize("tokenizer", [byte_level([" ab", "é"]), sentencepiece(PIECES)], ids=["byte-level", "sentencepiece"])
def test_the_bytes_of_tokens_join_to_the_text(tokenizer):
    text = "ab ab é😀\n"
    ids = tokenizer.encode(text, add_special_tokens=False)

    assert b"".join(tokenizer.token_bytes(i) for i in ids).decode().strip() == text.strip()
    assert tokenizer.token_text(tokenizer.encode("ab ab", add_special_tokens=False)[-1]).endswith("b")
    assert tokenizer.token_text(10**6) == ""


def test_single_tokens_keep_their_space_and_show_broken_characters():
    tokenizer = sentencepiece(PIECES)

    assert tokenizer.token_text(tokenizer.token_to_id("▁ab")) == " ab"
    assert tokenizer.token_text(byte_ids("é", first=3)[0]) == "\ufffd"
    assert tokenizer.token_text(tokenizer.eos_token_id) == "</s>"


def test_vocab_size_counts_up_to_the_last_id():
    tokenizer = byte_level(["ab"])

    assert tokenizer.vocab_size == 259
    assert tokenizer.id_to_token(258) == "ab"
    assert tokenizer.id_to_token(259) is None


def test_pieces_that_are_no_text_do_not_break_the_vocabulary():
    metadata = sentencepiece_metadata([*PIECES, b"\xff\xfe".decode("utf-8", "surrogateescape")])

    assert load(metadata).vocab_size == 259 + len(PIECES) + 1


def test_templates_come_with_their_names():
    templates = {"tokenizer.chat_template": "A", "tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "B"}
    tokenizer = byte_level(**templates)

    assert tokenizer.chat_template == "A"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], [{"type": "function"}]) == "B"


def test_transformers_gets_the_same_tokenizer():
    tokenizer = byte_level([" the"], **{"tokenizer.chat_template": "{{ messages[0].content }}"})

    assert tokenizer.hf.encode("in the<|end|>") == tokenizer.encode("in the<|end|>")
    assert tokenizer.hf.eos_token_id == 0
    assert tokenizer.hf.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "x"


@pytest.mark.parametrize("name", ["falcon", "gpt-2", "mpt"])
def test_public_vocabularies_give_the_published_ids(conformance_data, name):
    folder = conformance_data / "tokenizers" / "gguf_vocab"
    tokenizer = load(read_gguf(folder / f"ggml-vocab-{name}.gguf").metadata)
    texts = (folder / f"ggml-vocab-{name}.gguf.inp").read_text("utf-8").split("\n__ggml_vocab_test__\n")
    ids = (folder / f"ggml-vocab-{name}.gguf.out").read_text("utf-8").split("\n")

    for text, line in zip(texts, ids, strict=True):
        assert tokenizer.encode(text, add_special_tokens=False) == [int(i) for i in line.split()], text


def test_a_public_vocabulary_gives_the_ids_of_its_original_tokenizer(conformance_data):
    from tokenizers import Regex, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    original = conformance_data / "tokenizers" / "qwen2"
    backend = Backend(models.BPE.from_file(str(original / "vocab.json"), str(original / "merges.txt")))
    backend.normalizer = normalizers.NFC()
    pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    folder = conformance_data / "tokenizers" / "gguf_vocab"
    tokenizer = load(read_gguf(folder / "ggml-vocab-qwen2.gguf").metadata)
    texts = [text for file in folder.glob("*.inp") for text in file.read_text("utf-8").split("\n__ggml_vocab_test__\n")]

    assert json.loads((original / "tokenizer_config.json").read_text())["eos_token"] in tokenizer.added_tokens.values()
    for text in [*texts, "e\u0301", "١٢٣ ½", "a\r\nb\r\n\r\nc", "don't I'LL"]:
        assert tokenizer.encode(text, add_special_tokens=False) == backend.encode(text).ids, text
