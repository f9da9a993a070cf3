"""What each kind of constraint accepts, and what is refused before an engine sees it."""

from __future__ import annotations

import json
import time
from concurrent.futures import Future
from threading import Event

import pytest

from jaxllm.errors import InvalidRequestError, QueueFullError
from jaxllm.sampling_params import ReasoningMarks, StructuredOutputsParams
from jaxllm.text import grammar_compiler
from jaxllm.text.grammar import MAX_GRAMMAR_CHARS, output_grammar
from jaxllm.text.grammar_compiler import GrammarCompiler
from tests.tiny_tokenizers import byte_ids, byte_level, sentencepiece

EOS = [0]
TOKENIZER = byte_level(words=["</think>", "hello"])
COMPILER = GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size + 37)


def matcher_of(**constraint):
    grammar = output_grammar(StructuredOutputsParams(**constraint))
    COMPILER.check(grammar, EOS)
    return COMPILER.submit(grammar, EOS).result()


def accepts(text: str, **constraint) -> bool:
    matcher, ids = matcher_of(**constraint), byte_ids(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def refusal(**constraint) -> str:
    with pytest.raises(InvalidRequestError) as error:
        matcher_of(**constraint)
    assert error.value.param == "structured_outputs"
    return str(error.value)


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("constraint", "good", "bad"),
    [
        ({"json": PERSON}, ['{"name": "é", "age": 3}', '{"name":"","age":0}'], ['{"name": "a"}', '{"name": 1, "age": 2}', "null", "{}"]),
        ({"json": json.dumps(PERSON)}, ['{"name": "a", "age": 3}'], ['{"age": 3, "name": "a"}', '{"name": "a", "age": -1}']),
        ({"json": {"enum": ["a", 1, None]}}, ['"a"', "1", "null"], ["2", "a"]),
        ({"json": True}, ["1", "[]", '{"a": [null]}'], ["", "a"]),
        ({"json_object": True}, ["{}", '{"a": {"b": [1, 2.5e3]}}'], ["[]", "1", ""]),
        ({"regex": r"[a-c]+\d{2}"}, ["a12", "abc00"], ["12", "a1", "a123"]),
        ({"regex": "^(yes|no)$"}, ["yes", "no"], ["", "maybe"]),
        ({"choice": ["yes", "yes, please", 'say "no"\n']}, ["yes", "yes, please", 'say "no"\n'], ["", "no", "yes,"]),
        ({"choice": ["", "a"]}, ["", "a"], ["b"]),
        ({"grammar": 'start: "(" start ")" | X\nX: /[xy]+/'}, ["x", "((xy))"], ["(x", "z", ""]),
        ({"grammar": 'root ::= "(" root ")" | [xy]+'}, ["x", "((xy))"], ["(x", "z", ""]),
    ],
)
def test_a_constraint_accepts_what_fits_and_nothing_else(constraint, good, bad):
    assert {text: accepts(text, **constraint) for text in [*good, *bad]} == {**dict.fromkeys(good, True), **dict.fromkeys(bad, False)}


def test_whitespace_in_json_is_bounded_unless_asked_otherwise():
    spaced = '{"name" : "a",\n    "age":  3}'
    assert accepts('{"name" : "a",\n    "age": 3}', json=PERSON)
    assert not accepts('{"name": "a",' + " " * 100 + '"age": 3}', json=PERSON)
    assert not accepts('{"name": "a",' + "\n" * 100 + '"age": 3}', json_object=True)
    assert not accepts(spaced, json=PERSON, disable_any_whitespace=True)
    assert accepts('{"name":"a","age":3}', json=PERSON, disable_any_whitespace=True)
    assert accepts(spaced.replace("\n", ""), json=PERSON, whitespace_pattern=" {0,8}")


def test_additional_properties_are_closed_where_asked():
    schema = {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {}}}}, "default": {"properties": {}}}
    text = '{"a": {"b": 1, "c": 2}}'
    assert accepts(text, json=schema)
    assert not accepts(text, json=schema, disable_additional_properties=True)
    assert accepts('{"a": {"b": 1}}', json=schema, disable_additional_properties=True)


def test_descriptions_do_not_change_the_grammar():
    strange = ['"', "\\", "{}", "line\nbreak", "😀", "<tool>", "%json {", "x" * 5000]
    for text in strange:
        schema = {
            **PERSON,
            "description": text,
            "properties": {"name": {"type": "string", "description": text, "title": text}, "age": {"type": "integer"}},
        }
        assert accepts('{"name": "a", "age": 3}', json=schema)
        assert not accepts('{"name": "a"}', json=schema)


@pytest.mark.parametrize(
    "constraint",
    [
        {"json": {"type": "nonsense"}},
        {"json": {"type": 5}},
        {"json": "not json"},
        {"json": "[1]"},
        {"json": "false"},
        {"json": {"$ref": "#/definitions/missing"}},
        {"json": {"$ref": "#"}},
        {"json": {"$ref": "http://localhost:1/schema.json"}},
        {"json": {"type": "integer", "minimum": 5, "maximum": 2}},
        {"json": {"not": {"type": "string"}}},
        {"json": {"type": "array", "uniqueItems": True}},
        {"json": {"x-guidance": {"lenient": True}, "type": "array", "uniqueItems": True}},
        {"json": {"type": "string", "pattern": "("}},
        {"json": {"const": "a\0b"}},
        {"json": {"const": "\ud800"}},
        {"json": {"const": float("nan")}},
        {"json": {"const": {1, 2}}},
        {"json": {"description": "x" * (MAX_GRAMMAR_CHARS + 1)}},
        {"regex": "("},
        {"regex": "a{3,2}"},
        {"regex": r"(a)\1"},
        {"regex": "a\0"},
        {"regex": r"[^\s\S]"},
        {"regex": "(" * 5000 + "a" + ")" * 5000},
        {"choice": ["a\0"]},
        {"grammar": "start: start"},
        {"grammar": 'start: "a" <|nothing|>'},
        {"grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000},
        {"grammar": 'root := "x"'},
        {"grammar": 'rout::="x"'},
        {"grammar": 'root ::= "x'},
        {"grammar": "root ::= missing"},
        {"grammar": "root ::= root"},
        {"grammar": 'root ::= "a"\nroot ::= "b"'},
        {"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000},
        {"grammar": ""},
        {"structural_tag": "[]"},
        {"structural_tag": {}},
        {"structural_tag": {"format": {"type": "nonsense"}}},
        {"structural_tag": {"format": {"type": "json_schema", "json_schema": {"type": "nonsense"}}}},
        {"structural_tag": {"structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<g>"]}},
    ],
    ids=lambda constraint: str(constraint)[:60],
)
def test_what_is_wrong_or_not_supported_is_refused(constraint):
    started = time.monotonic()
    assert len(refusal(**constraint)) < 1500
    assert time.monotonic() - started < 60, "it hangs"


def test_a_deep_schema_is_refused_and_a_long_chain_of_rules_compiles():
    deep: dict = {}
    for _ in range(100):
        deep = {"type": "array", "items": deep}
    assert "deep" in refusal(json=deep)
    chain = {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(5000)} | {"5000": {"type": "null"}}
    assert accepts("null", json={"$ref": "#/$defs/0", "$defs": chain})
    rules = "\n".join(f"r{i}: r{i + 1}" for i in range(5000))
    assert accepts("a", grammar=f'start: r0\n{rules}\nr5000: "a"')


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"regex": "a", "choice": ["a"]},
        {"json_object": False},
        {"regex": 5},
        {"choice": []},
        {"choice": "abc"},
        {"regex": "a", "disable_any_whitespace": True},
        {"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "},
    ],
)
def test_parameters_that_do_not_fit_together_are_refused(fields):
    with pytest.raises(InvalidRequestError):
        StructuredOutputsParams(**fields)


def allowed(matcher) -> set[int]:
    mask = matcher.compute_bitmask()
    return {i for i in range(len(mask) * 8) if mask[i // 8] >> i % 8 & 1}


def test_special_tokens_are_no_text_and_the_end_comes_only_where_the_grammar_may_end():
    matcher = matcher_of(grammar=r'start: "a" /(?s:.)*/')
    assert not allowed(matcher) & {0, 1}
    matcher.consume_tokens(byte_ids("a"))
    ids = allowed(matcher)
    assert 0 in ids
    assert 1 not in ids
    assert max(ids) < TOKENIZER.vocab_size, "an id without text"
    assert 1 in allowed(matcher_of(grammar="start: <|start|>"))


def test_a_literal_that_looks_like_a_special_token_is_text():
    think = TOKENIZER.token_to_id("</think>")
    assert think is not None
    matcher = matcher_of(grammar='root ::= [a-z]* "</think>" [a-z]*')
    assert matcher.try_consume_tokens([*byte_ids("abc"), think, *byte_ids("d")]) == 5
    assert accepts("abc</think>", grammar='root ::= [a-z]* "</think>" [a-z]*')


def test_a_model_without_end_of_sequence_and_one_with_sentencepiece_pieces():
    compiler = GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size)
    matcher = compiler.submit(output_grammar(StructuredOutputsParams(choice=["ab"])), []).result()
    assert matcher.try_consume_tokens(byte_ids("ab")) == 2
    assert matcher.is_stopped()
    pieces = sentencepiece(["▁he", "llo"])
    compiler = GrammarCompiler(pieces, pieces.vocab_size)
    matcher = compiler.submit(output_grammar(StructuredOutputsParams(choice=[" hello"])), [2]).result()
    assert matcher.try_consume_tokens([259, 260]) == 2
    assert matcher.is_accepting()


CALL = {"type": "tag", "begin": "<f=add>", "content": {"type": "json_schema", "json_schema": PERSON}, "end": "</f>"}
SAID = '<f=add>{"name": "a", "age": 1}</f>'


@pytest.mark.parametrize(
    ("tag", "good", "bad"),
    [
        ({"format": CALL}, [SAID], ["", "<f=add>{}</f>", SAID + "x"]),
        ({"format": {"type": "triggered_tags", "triggers": ["<f="], "tags": [CALL]}},
         ["", "free text / é\n", SAID, f"a {SAID} b {SAID}"], ["<f=sub>", "<f=add>{}</f>", f"{SAID}<f="]),
        ({"format": {"type": "triggered_tags", "triggers": ["<f="], "tags": [CALL], "at_least_one": True, "stop_after_first": True}},
         [SAID], ["", "a", f"{SAID}a"]),
        ({"structures": [{"begin": "<f=add>", "schema": PERSON, "end": "</f>"}], "triggers": ["<f="]}, ["", SAID, f"x{SAID}y"], ["<f=b>"]),
        ({"format": {"type": "triggered_tags", "triggers": ["<f=a", "<f="], "tags": [CALL, CALL | {"begin": "<f=sub>"}]}},
         [SAID, SAID.replace("add", "sub")], ["<f=a>", "<f=s"]),
        ({"format": {"type": "sequence", "elements": [{"type": "any_text"}, {"type": "const_string", "value": "END"}, {"type": "any_text"},
                                                      CALL | {"content": {"type": "sequence", "elements": [{"type": "any_text"}]}}]}},
         ["END<f=add></f>", "aENDb END<f=add>c</f>"], ["a", "aEND", "aENDb</f>", "END<f=add></f>x"]),
        ({"format": {"type": "tags_with_separator", "tags": [CALL], "separator": ", "}}, ["", SAID, f"{SAID}, {SAID}"], [f"{SAID},{SAID}"]),
        ({"format": {"type": "sequence", "elements": [
            {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"}, {"type": "const_string", "value": "!"},
            {"type": "or", "elements": [
                {"type": "regex", "pattern": "[0-9]+/[0-9]"}, {"type": "grammar", "grammar": 'root ::= "x" root | "y"'}]}]}},
         ["<t>any\n<text></t>!1/2", "<t></t>!xxy"], ["<t></t></t>!y", "!y", "<t></t>!"]),
    ],
    ids=["tag", "triggered", "once", "older", "nested", "free", "separated", "sequence"],
)  # fmt: skip
def test_structural_tags(tag, good, bad):
    got = {text: accepts(text, structural_tag=tag) for text in [*good, *bad]}
    assert got == {**dict.fromkeys(good, True), **dict.fromkeys(bad, False)}
    assert accepts(good[0], structural_tag=json.dumps(tag))


def after(marks: dict, special: dict | None = None, **constraint):
    params = StructuredOutputsParams(**constraint, after_reasoning=ReasoningMarks(**marks))
    grammar = output_grammar(params, (special or {}).get)
    COMPILER.check(grammar, EOS)
    return COMPILER.submit(grammar, EOS).result()


def test_what_belongs_to_the_answer_waits_for_the_end_of_reasoning():
    matcher = after({"starts": ["<think>"], "ends": ["</think>"], "is_open": True, "implied_ends": ["<call>"]}, choice=["<call>"])
    assert matcher.try_consume_tokens(byte_ids("a <call>")) == len("a <call")
    assert matcher.try_consume_tokens(byte_ids(" b</think><call>")) == len(" b</think><call>")


@pytest.mark.parametrize("constraint", [{"json": {"type": "null"}}, {"regex": "nul{2}"}, {"regex": "(?!x)null"}, {"choice": ["null"]},
                                        {"grammar": 'start: "null"'}, {"grammar": 'root ::= "nu" "ll"'},
                                        {"structural_tag": {"format": {"type": "const_string", "value": "null"}}}])  # fmt: skip
def test_a_constraint_begins_behind_reasoning(constraint):
    marks = {"starts": ["<think>"], "ends": ["</think>"]}
    for is_open, text, good in [
        (True, "I think { </thin so\n</think>null", True),
        (True, "</think>\n\nnull", True),
        (True, "null", False),
        (True, "a</think>nil", False),
        (True, "a</think></think>null", False),
        (False, "null", True),
        (False, "<think>hm</think>null", True),
        (False, "hm</think>null", False),
    ]:
        matcher, ids = after({**marks, "is_open": is_open, "newlines": True}, **constraint), byte_ids(text)
        assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) == good, text


def test_marks_of_reasoning_may_be_special_tokens():
    matcher = after({"starts": ["[T]"], "ends": ["<|start|>"], "is_open": True}, {"<|start|>": 1}, choice=["yes"])
    assert matcher.try_consume_tokens([*byte_ids("hm <|start|> hm"), 1, *byte_ids("yes")]) == 19
    assert matcher.is_stopped()


@pytest.mark.parametrize(("began", "error"), [(True, InvalidRequestError), (False, QueueFullError)])
def test_a_grammar_is_not_blamed_for_those_before_it(monkeypatch: pytest.MonkeyPatch, began: bool, error: type[Exception]):
    compiling = Future()
    if began:
        compiling.set_running_or_notify_cancel()
    monkeypatch.setattr(grammar_compiler, "COMPILE_SECONDS", 0.01)
    monkeypatch.setattr(COMPILER, "submit", lambda grammar, eos: compiling)
    with pytest.raises(error):
        COMPILER.check(output_grammar(StructuredOutputsParams(choice=["a"])), EOS)


def test_short_grammars_do_not_wait_for_long_ones(monkeypatch: pytest.MonkeyPatch):
    compiler, go_on = GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size), Event()
    compile_one = compiler._matcher

    def slow_where_long(grammar, eos):
        assert len(grammar) < 1000 or go_on.wait(60)
        return compile_one(grammar, eos)

    monkeypatch.setattr(compiler, "_matcher", slow_where_long)
    grammars = [output_grammar(StructuredOutputsParams(choice=[f"{i} {text}" for text in range(5000)])) for i in range(5)]
    long = [compiler.submit(grammar, EOS) for grammar in grammars]
    compiler.check(output_grammar(StructuredOutputsParams(choice=["a"])), EOS)
    assert not any(future.done() for future in long)
    go_on.set()
    assert all(future.result(60) for future in long)
