"""Streamed text: whole characters, nothing lost, nothing taken back, and bounded work a token."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.text.decode_stream import TextStream
from tests.tiny_tokenizers import byte_ids, byte_level, sentencepiece

BYTE_LEVEL = byte_level(["hello", " world", "é"])
SENTENCEPIECE = sentencepiece(
    ["▁", "h", "e", "l", "o", "w", "r", "d", "▁h", "▁w", "he", "ll", "▁he", "▁hello", "▁world", "▁wor", "ld", "or"]
)
SENTENCES = ["é", "你好", "😀", "👩‍👩‍👧‍👦 🇩🇪", "naïve café", "a\u0301b", "日本語 text"]


def stream_all(tokenizer, ids, prompt=(), skip=True):
    stream = tokenizer.decode_stream(prompt, skip_special_tokens=skip)
    return [*(stream.step(token_id) for token_id in ids), stream.flush()]


@pytest.mark.parametrize("text", SENTENCES)
@pytest.mark.parametrize(("tokenizer", "first"), [(BYTE_LEVEL, 2), (SENTENCEPIECE, 3)], ids=["byte-level", "byte-fallback"])
def test_characters_given_byte_by_byte_come_whole(tokenizer, first, text):
    deltas = stream_all(tokenizer, byte_ids(text, first=first))

    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_stream_to_what_decoding_them_at_once_gives(data):
    ids = byte_ids(data)

    text = "".join(stream_all(BYTE_LEVEL, ids))

    # Cutting into a run of garbage may show one broken character as two; nothing else may differ.
    whole = BYTE_LEVEL.decode(ids)
    assert text.replace("\ufffd", "") == whole.replace("\ufffd", "")
    assert text.count("\ufffd") >= whole.count("\ufffd")


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), st.integers(0, 10))
def test_text_split_between_prompt_and_output_is_neither_lost_nor_doubled(text, cut):
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False)
    prompt, output = ids[:cut], ids[cut:]

    streamed = "".join(stream_all(BYTE_LEVEL, output, prompt=prompt))

    # A character that the prompt left unfinished belongs to the output.
    whole = BYTE_LEVEL.decode(ids)
    assert whole.endswith(streamed)
    assert BYTE_LEVEL.decode(prompt).rstrip("\ufffd") + streamed == whole or not output


@pytest.mark.parametrize(("tokenizer", "first"), [(BYTE_LEVEL, 2), (SENTENCEPIECE, 3)], ids=["byte-level", "byte-fallback"])
def test_lone_bytes_are_delivered_and_never_pile_up(tokenizer, first):
    stream = tokenizer.decode_stream()
    text, most_waiting = "", 0

    for token_id in byte_ids(b"\x80", first=first) * 2000:
        text += stream.step(token_id)
        most_waiting = max(most_waiting, len(stream._pending))

    assert text + stream.flush() == "\ufffd" * 2000
    assert len(text) > 1900
    assert most_waiting <= 8


def test_a_character_after_garbage_is_whole():
    deltas = stream_all(BYTE_LEVEL, byte_ids(b"\x80" * 20 + "你".encode() + b"!"))

    assert "".join(deltas) == "\ufffd" * 20 + "你!"


def test_garbage_then_valid_bytes_of_a_byte_fallback_tokenizer_lose_nothing():
    deltas = stream_all(SENTENCEPIECE, [*byte_ids(b"\x80" * 9 + "你".encode(), first=3), SENTENCEPIECE.token_to_id("▁hello")])

    assert "".join(deltas).endswith(" hello")
    assert len("".join(deltas).replace(" hello", "")) >= 10


def test_a_skipped_special_token_costs_nothing_and_keeps_the_next_space():
    end = SENTENCEPIECE.token_to_id("</s>")
    hello, world = (SENTENCEPIECE.token_to_id(piece) for piece in ("▁hello", "▁world"))
    stream = SENTENCEPIECE.decode_stream([hello])

    for _ in range(100):
        assert stream.step(end) == ""
        assert len(stream._pending) <= 8

    assert stream.step(world) == " world"


def test_the_first_word_after_a_prompt_keeps_its_space():
    hello, world = (SENTENCEPIECE.token_to_id(piece) for piece in ("▁hello", "▁world"))

    assert stream_all(SENTENCEPIECE, [world], prompt=[1, hello]) == [" world", ""]
    assert stream_all(SENTENCEPIECE, [world]) == ["world", ""]


def test_special_tokens_are_text_where_they_are_not_skipped():
    assert "".join(stream_all(BYTE_LEVEL, [*byte_ids("a"), 0, *byte_ids("b")], skip=False)) == "a<|end|>b"
    assert "".join(stream_all(BYTE_LEVEL, [*byte_ids("a"), 0, *byte_ids("b")], skip=True)) == "ab"


def test_ids_beyond_the_vocabulary_are_no_text():
    assert "".join(stream_all(BYTE_LEVEL, [*byte_ids("a"), 10**6, *byte_ids("b")])) == "ab"


def test_the_replacement_character_itself_can_be_said():
    assert "".join(stream_all(BYTE_LEVEL, byte_ids("a\ufffdb\ufffd"))) == "a\ufffdb\ufffd"


def test_an_unfinished_character_is_replaced_at_the_end():
    assert "".join(stream_all(BYTE_LEVEL, byte_ids("ok" + "😀")[:-1])) == "ok\ufffd"


def test_a_prompt_of_garbage_gives_no_text_of_its_own():
    stream = TextStream(BYTE_LEVEL.backend, byte_ids(b"\x80" * 10))

    assert "".join(stream.step(token_id) for token_id in byte_ids("hi")) == "hi"
