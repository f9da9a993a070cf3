"""Reasoning ends once its budget is used up, wherever its marks stand and however they are cut into tokens."""

from __future__ import annotations

import pytest

from jaxllm.engine.thinking import ThinkingBudget
from jaxllm.sampling_params import ReasoningMarks, SamplingParams

CLOSING = [900, 901]


def budget(tokens: int, **marks: object) -> ThinkingBudget:
    given = {"starts": ["<think>"], "ends": ["</think>"], "is_open": True, "closing_ids": CLOSING, **marks}
    params = SamplingParams(thinking_token_budget=tokens, reasoning_marks=ReasoningMarks(**given))
    texts = {900: b"</thi", 901: b"nk>"}
    return ThinkingBudget(params, lambda token: texts.get(token) or bytes([token]))


def say(thinking: ThinkingBudget, text: str) -> list[int | None]:
    """What was forced before each character of a text, which is then said."""
    forced = []
    for char in text.encode():
        forced.append(thinking.forced)
        thinking.accept(char)
    return forced


def test_the_end_comes_after_the_budget_and_the_answer_is_free() -> None:
    thinking = budget(3)
    assert say(thinking, "abc") == [None, None, None]
    assert thinking.is_due(0)
    for token in CLOSING:
        assert thinking.forced == token
        thinking.accept(token)
    assert not thinking.is_inside
    assert say(thinking, "an answer with <think> in it") == [None] * 28
    assert not thinking.is_due(5)


def test_a_budget_of_nothing_ends_it_at_once() -> None:
    assert budget(0).forced == CLOSING[0]


def test_a_character_that_was_begun_is_finished_first() -> None:
    thinking = budget(1)
    assert say(thinking, "😀") == [None] * 4
    assert thinking.forced == CLOSING[0]
    thinking = budget(1)
    for _ in range(5):
        assert thinking.forced is None
        thinking.accept(0xC3)
    assert thinking.forced == CLOSING[0]


@pytest.mark.parametrize("end", ["</think>", "<call>"])
def test_an_end_of_its_own_is_seen_in_other_tokens(end: str) -> None:
    thinking = budget(10, implied_ends=["<call>"])
    say(thinking, f"so{end}")
    assert not thinking.is_inside
    assert set(say(thinking, "an answer that is longer")) == {None}


@pytest.mark.parametrize(("text", "forced"), [("\n<think>ab", CLOSING[0]), ("<thin air>", None), ("Yes", None)])
def test_where_the_prompt_opens_nothing_the_output_may(text: str, forced: int | None) -> None:
    thinking = budget(2, is_open=False)
    say(thinking, text)
    assert thinking.forced == forced
    assert thinking.is_due(0) == (forced is not None)


def test_reasoning_that_may_come_again_counts_in_all() -> None:
    thinking = budget(5, is_open=False, anywhere=True, starts=["[T]"], ends=["[/T]"])
    assert set(say(thinking, "a[T]b[/T]c[T]")) == {None}
    assert thinking.forced is not None


def test_tokens_in_flight_count() -> None:
    thinking = budget(5)
    say(thinking, "abc")
    assert [thinking.is_due(count) for count in (0, 1, 2)] == [False, False, True]
