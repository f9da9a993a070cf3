"""Every format gives the same message however its text is cut, and no text breaks a parser or gets lost in it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.server.parsers import REASONING_FORMATS, TOOL_FORMATS, ArgumentsDelta, ContentDelta, OutputParser, ReasoningDelta, ToolCallStart
from tests.server.parsers.examples import ALL, REASONING_EXAMPLES, TOOL_EXAMPLES, Example
from tests.server.parsers.parsed import Parsed, chunkings, parse

TOOL_NAMES = sorted({form.name for form in TOOL_FORMATS.values()})
REASONING_NAMES = sorted({form.name for form in REASONING_FORMATS.values()})
EXAMPLES = [("tool", name, example) for name, examples in TOOL_EXAMPLES.items() for example in examples] + [
    ("reasoning", name, example) for name, examples in REASONING_EXAMPLES.items() for example in examples
]


def make(kind: str, name: str, tools: list[dict[str, Any]] | None = None) -> OutputParser:
    if kind == "reasoning":
        return OutputParser(None, REASONING_FORMATS[name])
    reasoning = REASONING_FORMATS["openai_gptoss"] if name == "openai" else None
    return OutputParser(TOOL_FORMATS[name], reasoning, schemas=tools)


def as_expected(example: Example, parsed: Parsed) -> bool:
    calls = [(call.name, call.value, call.id) for call in parsed.calls]
    return (parsed.content, parsed.reasoning, calls) == (example.content, example.reasoning, example.calls)


def test_every_format_has_examples() -> None:
    assert set(TOOL_EXAMPLES) == set(TOOL_NAMES)
    assert set(REASONING_EXAMPLES) == set(REASONING_NAMES)


@pytest.mark.parametrize(("kind", "name", "example"), EXAMPLES)
def test_examples_are_read_right_under_every_cut(kind: str, name: str, example: Example) -> None:
    for pieces in chunkings(example.output):
        parsed = parse(make(kind, name, example.tools), pieces)
        assert as_expected(example, parsed), (pieces, parsed)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(EXAMPLES), st.data())
def test_random_cuts_change_nothing(case: tuple[str, str, Example], data: st.DataObject) -> None:
    kind, name, example = case
    cuts = sorted(data.draw(st.sets(st.integers(0, len(example.output)))))
    pieces = [example.output[start:end] for start, end in zip([0, *cuts], [*cuts, len(example.output)], strict=True)]
    assert as_expected(example, parse(make(kind, name, example.tools), pieces))


def fragments(name: str) -> st.SearchStrategy[str]:
    """Texts made of pieces of the format's examples, of markers, words and brackets."""
    source = "".join(example.output for example in (TOOL_EXAMPLES.get(name, []) + REASONING_EXAMPLES.get(name, [])))
    pieces = st.tuples(st.integers(0, len(source)), st.integers(1, 40)).map(lambda span: source[span[0] : span[0] + span[1]])
    words = st.sampled_from(
        ["{", "}", "[", "]", '"', "'", ",", ":", "\\", "(", ")", "=", "<", ">", "|", "\n", " ", "name", "1", "call", "é😀"]
    )
    return st.lists(st.one_of(pieces, words, st.text(max_size=5)), max_size=25).map("".join)


@pytest.mark.parametrize("name", TOOL_NAMES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_no_text_breaks_a_tool_parser(name: str, data: st.DataObject) -> None:
    text = data.draw(fragments(name))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=20)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parse(make("tool", name, ALL), [text])
    assert parse(make("tool", name, ALL), pieces) == whole == parse(make("tool", name, ALL), text)
    assert all(isinstance(call.value, dict) for call in whole.calls)
    parse(make("tool", name), pieces, truncated=True)


@pytest.mark.parametrize("name", REASONING_NAMES)
@settings(max_examples=40, deadline=None)
@given(data=st.data(), inside=st.sampled_from([None, True, False]))
def test_no_text_breaks_a_reasoning_parser(name: str, data: st.DataObject, inside: bool | None) -> None:
    text = data.draw(fragments(name))
    results = [
        parse(OutputParser(TOOL_FORMATS["hermes"], REASONING_FORMATS[name], starts_in_reasoning=inside), pieces)
        for pieces in ([text], text, [text[:7], text[7:]])
    ]
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("name", TOOL_NAMES)
@settings(max_examples=40, deadline=None)
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_text_without_calls_is_the_answer(name: str, text: str) -> None:
    if name == "openai" and "to=" in text:
        return
    assert parse(make("tool", name, ALL), text).content == text


@pytest.mark.parametrize("name", sorted(set(TOOL_NAMES) - {"openai"}))
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_words_between_broken_calls_are_not_lost(name: str, data: st.DataObject) -> None:
    """Markers in any order with words between them: every word is in the answer, in a name or in arguments, once and in order."""
    form = TOOL_FORMATS[name]
    markers = [
        *form.opens,
        *form.closes,
        *form.bare,
        *form.bare_anywhere,
        *getattr(form, "call_opens", ()),
        *getattr(form, "call_closes", ()),
    ]
    chosen = data.draw(st.lists(st.sampled_from(markers), max_size=8))
    words = [f"word{number}." for number in range(len(chosen) + 1)]
    text = words[0] + "".join(marker + word for marker, word in zip(chosen, words[1:], strict=True))
    parsed = parse(make("tool", name), text)
    everything = parsed.content + "".join(call.name + call.arguments for call in parsed.calls)
    assert [word for word in words if everything.count(word) != 1] == []


@pytest.mark.parametrize(("kind", "name", "example"), [case for case in EXAMPLES if case[2].calls])
def test_a_limit_leaves_a_beginning_of_the_calls(kind: str, name: str, example: Example) -> None:
    whole = parse(make(kind, name, example.tools), [example.output])
    for end in range(len(example.output)):
        cut = parse(make(kind, name, example.tools), [example.output[:end]], truncated=True)
        assert [call.name for call in cut.calls] == [call.name for call in whole.calls][: len(cut.calls)]
        ended = parse(make(kind, name, example.tools), [example.output[:end]])
        assert all(isinstance(call.value, dict) for call in ended.calls)


def test_text_streams_while_tools_are_there() -> None:
    parser = OutputParser(TOOL_FORMATS["hermes"])
    said = [parser.feed(piece) for piece in ("Hello", " wor", "ld <", "b>", " <tool_", "box>")]
    assert said == [
        [ContentDelta("Hello")],
        [ContentDelta(" wor")],
        [ContentDelta("ld")],
        [ContentDelta(" <b>")],
        [],
        [ContentDelta(" <tool_box>")],
    ]


def test_arguments_stream_within_a_string() -> None:
    parser = OutputParser(TOOL_FORMATS["hermes"])
    assert parser.feed('<tool_call>{"name": "f", "arguments": {"text": "one') == [
        ToolCallStart(0, "f", None),
        ArgumentsDelta(0, '{"text": "one'),
    ]
    assert parser.feed(" two") == [ArgumentsDelta(0, " two")]
    assert parser.feed('"}}</tool_call>') == [ArgumentsDelta(0, '"}')]


def test_reasoning_streams() -> None:
    parser = OutputParser(TOOL_FORMATS["hermes"], REASONING_FORMATS["qwen3"])
    assert parser.feed("<think>\nOne") == [ReasoningDelta("One")]
    assert parser.in_reasoning
    assert parser.feed(" two\n</think>\n\nYes") == [ReasoningDelta(" two"), ContentDelta("Yes")]
    assert not parser.in_reasoning


@pytest.mark.parametrize("inside", [True, False])
def test_the_prompt_decides_whether_output_begins_in_reasoning(inside: bool) -> None:
    parsed = parse(OutputParser(None, REASONING_FORMATS["qwen3"], starts_in_reasoning=inside), ["Yes"])
    assert (parsed.reasoning, parsed.content) == (("Yes", "") if inside else ("", "Yes"))


def test_an_id_counts_once() -> None:
    call = "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    parsed = parse(make("tool", "kimi_k2"), [f"<|tool_calls_section_begin|>{call}{call}<|tool_calls_section_end|>"])
    assert [one.id for one in parsed.calls] == ["functions.f:0", None]


@pytest.mark.parametrize(
    "text", ['<tool_call>{"name": "f", "arguments": {"a": "' + "x" * 5000, "<tool_call>" * 500, " " * 5000, "[{" * 3000, "</" * 3000]
)
def test_little_is_held_back(text: str) -> None:
    """What was decided is let go: time is linear in the text."""
    for name in TOOL_NAMES:
        parser = make("tool", name)
        for piece in text:
            parser.feed(piece)
            assert len(parser._source.text) < 1200
        parser.finish()


def test_deep_nesting_is_no_error() -> None:
    parsed = parse(make("tool", "hermes"), ['<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 100_000])
    assert isinstance(json.loads(parsed.calls[0].arguments), dict)
