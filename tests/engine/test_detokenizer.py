"""Text of generated tokens: stop strings are never seen, nothing else is held back, and chunking changes nothing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.engine.detokenizer import IncrementalDetokenizer
from jaxllm.sampling_params import SamplingParams
from tests.tiny_tokenizers import byte_ids, byte_level

WORDS = ["ab", "abc", "bca", "cc", "ABC", "DE", "F", "GH", " the", "stop"]
TOKENIZER = byte_level(WORDS)
END = TOKENIZER.eos_token_id


def tok(word: str) -> int:
    (token_id,) = TOKENIZER.encode(word, add_special_tokens=False)
    return token_id


def detokenizer(prompt=(), **params) -> IncrementalDetokenizer:
    return IncrementalDetokenizer(TOKENIZER, list(prompt), SamplingParams(**params))


def run(steps, *, finished=True, **params):
    """Feed lists of ids step by step; returns (stop string, deltas of each step and of the end, the detokenizer)."""
    subject = detokenizer(**params)
    deltas = []
    for ids in steps:
        stop = subject.update(ids)
        deltas.append(subject.next_delta(finished=stop is not None))
        if stop is not None:
            return stop, deltas, subject
    if finished:
        deltas.append(subject.next_delta(finished=True))
    return None, deltas, subject


def test_a_stop_string_across_tokens_is_never_seen():
    stop, deltas, subject = run([[tok("ABC")], [tok("DE")], [tok("F")], [tok("GH")]], stop=["DEFGH"])

    assert stop == "DEFGH"
    assert deltas == ["ABC", "", "", ""]
    assert len(subject.token_ids) == 4


def test_held_back_text_is_released_when_the_match_fails():
    _, deltas, _ = run([[tok("ABC")], [tok("DE")], [tok("F")], [tok("ab")]], stop=["DEFGH"])

    assert deltas == ["ABC", "", "", "DEFab", ""]


def test_only_what_can_become_a_stop_string_is_held_back():
    _, deltas, _ = run([[tok("ABC")], [tok(" the")], [tok("DE")]], stop=["DEFGH", "the end"], finished=False)

    assert deltas == ["ABC", " ", "theDE"[:3]]


def test_held_back_text_comes_at_the_end():
    _, deltas, _ = run([[tok("ABC")], [tok("DE")]], stop=["DEFGH"])

    assert deltas == ["ABC", "", "DE"]


def test_text_behind_a_stop_string_in_the_same_token_is_dropped():
    stop, deltas, _ = run([[tok("a"), tok("bca")]], stop=["bc"])

    assert (stop, deltas) == ("bc", ["a"])


def test_the_stop_string_stays_where_it_is_asked_for():
    stop, deltas, _ = run([[tok("ABC")], [tok("DE")], [tok("F")], [tok("GH")]], stop=["EFG"], include_stop_str_in_output=True)

    assert stop == "EFG"
    assert deltas == ["ABC", "DE", "F", "G"]


def test_tokens_behind_the_completing_one_are_dropped():
    subject = detokenizer(stop=["DE"])

    assert subject.update([tok("ABC"), tok("DE"), tok("F"), tok("GH")]) == "DE"
    assert subject.token_ids == [tok("ABC"), tok("DE")]
    assert subject.next_delta(finished=True) == "ABC"
    assert subject.update([tok("F")]) is None
    assert subject.next_delta(finished=True) == ""


def test_of_two_stop_strings_the_first_in_the_text_wins():
    assert run([[tok("ABC"), tok("DE")]], stop=["E", "B"])[:2] == ("B", ["A"])


def test_stop_strings_do_not_count_before_min_tokens():
    stop, deltas, _ = run([[tok("F")], [tok("F")], [tok("F")], [tok("F")]], stop=["F"], min_tokens=2)

    assert stop == "F"
    assert "".join(deltas) == "FF"


def test_a_stop_string_may_begin_before_min_tokens_and_end_after():
    stop, deltas, _ = run([[tok("DE")], [tok("F")]], stop=["EF"], min_tokens=1)

    assert (stop, "".join(deltas)) == ("EF", "D")


def test_a_stop_token_counts_as_output_and_is_no_text():
    subject = detokenizer()
    subject.update([tok("ABC"), tok("F")], stop_terminated=True)

    assert subject.token_ids == [tok("ABC"), tok("F")]
    assert subject.next_delta(finished=True) == "ABC"


def test_a_stop_token_is_text_where_it_is_asked_for():
    subject = detokenizer(include_stop_str_in_output=True)
    subject.update([tok("ABC"), tok("F")], stop_terminated=True)

    assert subject.next_delta(finished=True) == "ABCF"


def test_a_stop_string_before_a_stop_token_wins():
    subject = detokenizer(stop=["C"])

    assert subject.update([tok("ABC"), tok("F")], stop_terminated=True) == "C"
    assert subject.token_ids == [tok("ABC")]


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_are_skipped_or_shown(skip):
    subject = detokenizer(skip_special_tokens=skip)
    subject.update([tok("ABC"), END, tok("F")])

    assert subject.next_delta(finished=True) == ("ABCF" if skip else "ABC<|end|>F")


def test_without_detokenizing_there_is_no_text():
    subject = detokenizer(detokenize=False)

    assert subject.update([tok("ABC")]) is None
    assert subject.token_ids == [tok("ABC")]
    assert subject.next_delta(finished=True) == ""


def test_deltas_of_characters_cut_into_bytes_hold_no_replacement():
    text = "é 你 👩‍👩‍👧"
    _, deltas, _ = run([[token_id] for token_id in byte_ids(text)], stop=["never"])

    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)


def test_an_unfinished_character_is_delivered_at_the_end():
    _, deltas, _ = run([byte_ids("a"), byte_ids("é")[:1]])

    assert deltas == ["a", "", "\ufffd"]


def expected(tokens: list[int], stops: list[str], include: bool, min_tokens: int):
    """What stop strings mean, character by character: (stop string, text, tokens used)."""
    text = ""
    for used, token_id in enumerate(tokens, start=1):
        for char in TOKENIZER.token_text(token_id):
            text += char
            stop = next((stop for stop in stops if text.endswith(stop)), None) if used > min_tokens else None
            if stop is not None:
                return stop, text if include else text[: -len(stop)], used
    return None, text, len(tokens)


def open_end(text: str, stops: list[str]) -> int:
    """Length of the longest end of `text` that begins a stop string."""
    return max(
        (size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])),
        default=0,
    )


TOKENS = st.lists(st.sampled_from([tok(word) for word in ("a", "b", "c", "ab", "abc", "bca", "cc")]), max_size=12)
STOPS = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=3)


@settings(max_examples=500, deadline=None)
@given(tokens=TOKENS, stops=STOPS, include=st.booleans(), min_tokens=st.integers(0, 4), sizes=st.lists(st.integers(1, 4), min_size=12))
def test_any_chunking_gives_the_same_text_and_holds_back_no_more_than_needed(tokens, stops, include, min_tokens, sizes):
    want_stop, want_text, used = expected(tokens, stops, include, min_tokens)
    subject = detokenizer(stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens)
    seen, rest, stop = "", list(tokens), None

    while rest and stop is None:
        size = sizes.pop()
        stop = subject.update(rest[:size])
        rest = rest[size:]
        seen += subject.next_delta(finished=stop is not None)
        if stop is None:
            text = "".join(map(TOKENIZER.token_text, subject.token_ids))
            held = 0 if include else open_end(text, stops)
            assert seen == text[: len(text) - held]
            assert want_text.startswith(seen)
    seen += subject.next_delta(finished=True)

    assert (stop, seen, len(subject.token_ids)) == (want_stop, want_text, used)
