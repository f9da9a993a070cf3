"""Structured outputs end to end: real engine, real steps, models of random weights and one that would say otherwise."""

from __future__ import annotations

import json
import random
import re

import jsonschema
import pytest

from jaxllm import LLM, SamplingParams, StructuredOutputsParams
from jaxllm.errors import InvalidRequestError
from tests.checkpoints import FIRST_BYTE_ID, tiny_config, write_model, write_scripted_model
from tests.random_schemas import misfit, random_schema

pytestmark = pytest.mark.heavy

CONTEXT = 512
OPTIONS = {
    "max_model_len": CONTEXT,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "block_size": 16,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 2**26,
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"enum": ["S", "M", "L"]},
        "counts": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "inner": {"$ref": "#/$defs/inner"},
    },
    "required": ["name", "size", "counts", "inner"],
    "additionalProperties": False,
    "$defs": {"inner": {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
                                                     "additionalProperties": False}]}},
}  # fmt: skip
PATTERN = r"[a-f]{2,4}(-[0-9]{1,3}){2}"


def fits_gbnf(text: str) -> bool:
    while "(" in text:
        text, before = re.sub(r"\(([xy]{1,3})\)", r"\1", text), text
        if text == before:
            return False
    return re.fullmatch("[xy]{1,3}", text) is not None


CONSTRAINTS = {
    "json": (StructuredOutputsParams(json=SCHEMA), lambda text: jsonschema.validate(json.loads(text), SCHEMA) is None),
    "compact": (
        StructuredOutputsParams(json=json.dumps(SCHEMA), disable_any_whitespace=True),
        lambda text: jsonschema.validate(json.loads(text), SCHEMA) is None and not re.search(r"\s", re.sub(r'"(\\.|[^"\\])*"', "", text)),
    ),
    "regex": (StructuredOutputsParams(regex=PATTERN), lambda text: re.fullmatch(PATTERN, text) is not None),
    "choice": (StructuredOutputsParams(choice=["yes", "no", "größer"]), lambda text: text in ("yes", "no", "größer")),
    "gbnf": (StructuredOutputsParams(grammar='root ::= "(" root ")" | [xy]{1,3}'), fits_gbnf),
    "lark": (
        StructuredOutputsParams(grammar='start: "<" WORD ("," WORD)? ">"\nWORD: /[a-c]{1,5}/'),
        lambda text: re.fullmatch("<[a-c]{1,5}(,[a-c]{1,5})?>", text) is not None,
    ),
    "tag": (
        StructuredOutputsParams(structural_tag={"format": {
            "type": "tag", "begin": "<call>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</call>"}}),
        lambda text: jsonschema.validate(json.loads(text[len("<call>") : -len("</call>")]), SCHEMA) is None,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def random_model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("random"), tiny_config(vocab_size=320, max_position_embeddings=CONTEXT), seed=5)


@pytest.fixture(scope="module", params=[True, False], ids=["overlapped", "plain"])
def llm(random_model, request):
    with LLM(str(random_model), async_scheduling=request.param, **OPTIONS) as llm:
        yield llm


def run(llm, params):
    return llm.generate(["a prompt that all share, long enough for pages"] * len(params), params, use_tqdm=False)


def test_outputs_of_random_weights_fit_and_plain_rows_beside_them_do_not_change(llm):
    plain = [SamplingParams(max_tokens=24, temperature=1.0, seed=i) for i in range(4)]
    alone = [output.outputs[0].token_ids for output in run(llm, plain)]
    names = list(CONSTRAINTS) * 3
    constrained = [
        SamplingParams(max_tokens=400, temperature=1.0, seed=i, structured_outputs=CONSTRAINTS[name][0]) for i, name in enumerate(names)
    ]
    outputs = run(llm, [*constrained[:10], *plain, *constrained[10:]])
    assert [output.outputs[0].token_ids for output in outputs[10:14]] == alone
    ended = 0
    for name, output in zip(names, outputs[:10] + outputs[14:], strict=True):
        choice = output.outputs[0]
        assert choice.finish_reason in ("stop", "length")
        if choice.finish_reason == "stop":
            ended += 1
            assert CONSTRAINTS[name][1](choice.text), (name, choice.text)
    assert ended > len(names) / 2


def test_schemas_at_random_are_refused_or_kept_to(llm):
    rng, kept = random.Random(1), []
    # Random text would seldom come to its end.
    bias = {FIRST_BYTE_ID + ord(char): 6.0 for char in '"}],'}
    for seed in range(40):
        schema = random_schema(rng)
        params = SamplingParams(
            max_tokens=150, temperature=1.0, seed=seed, logit_bias=bias, structured_outputs=StructuredOutputsParams(json=schema)
        )
        try:
            llm._front.input.process(str(seed), "x", params)
        except InvalidRequestError:
            continue
        kept.append((schema, params))
    choices = [output.outputs[0] for output in run(llm, [params for _, params in kept])]
    ended = [(schema, choice) for (schema, _), choice in zip(kept, choices, strict=True) if choice.finish_reason == "stop"]
    assert len(ended) > 15
    assert [(schema, choice.text) for schema, choice in ended if misfit(schema, choice.text) is not None] == []
    assert {choice.finish_reason for choice in choices} <= {"stop", "length"}


def test_many_constrained_requests_leave_later_plain_ones_as_they_were(llm):
    plain = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    before = run(llm, [plain])[0].outputs[0].token_ids
    mixed = [SamplingParams(max_tokens=12, temperature=1.0, structured_outputs=StructuredOutputsParams(json_object=True)), plain] * 20
    outputs = run(llm, mixed)
    assert all(output.outputs[0].token_ids == before for output in outputs[1::2])
    assert all(output.outputs[0].text.startswith("{") for output in outputs[::2])
    assert run(llm, [plain])[0].outputs[0].token_ids == before


def test_n_logprobs_penalties_and_bans_work_with_a_grammar(llm):
    constraint = StructuredOutputsParams(regex="[a-e]{12}")
    params = SamplingParams(n=3, seed=1, logprobs=2, repetition_penalty=1.3, bad_words=["a", "bc"], structured_outputs=constraint)
    (output,) = run(llm, [params])
    for choice in output.outputs:
        assert re.fullmatch("[b-e]{12}", choice.text)
        assert "bc" not in choice.text
        assert len(choice.logprobs) == 12
        assert all(token in step for token, step in zip(choice.token_ids, choice.logprobs, strict=True))


def test_stop_strings_and_limits_cut_a_grammar_short(llm):
    constraint = StructuredOutputsParams(regex="ab(cd){50}")
    stopped, cut = run(llm, [SamplingParams(stop=["dc"], max_tokens=50, structured_outputs=constraint),
                             SamplingParams(max_tokens=5, structured_outputs=constraint)])  # fmt: skip
    assert (stopped.outputs[0].text, stopped.outputs[0].stop_reason) == ("abc", "dc")
    assert (cut.outputs[0].text, cut.outputs[0].finish_reason) == ("abcdc", "length")


def test_what_is_wrong_is_refused_before_anything_runs(llm):
    for constraint in (
        StructuredOutputsParams(json={"type": "nonsense"}),
        StructuredOutputsParams(regex="("),
        StructuredOutputsParams(grammar="root ::= x"),
    ):
        with pytest.raises(InvalidRequestError):
            llm.generate(["a"], SamplingParams(structured_outputs=constraint), use_tqdm=False)
    with pytest.raises(InvalidRequestError):
        SamplingParams(structured_outputs={"json": {}})


SCRIPT = "I would rather say something else, at length. " * 8


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    """Says SCRIPT, whatever the prompt. A token of several bytes is there to be taken where it fits."""
    words = ["</think>", '": "', "yes"]
    directory = write_scripted_model(tmp_path_factory.mktemp("scripted"), SCRIPT, words=words, max_positions=CONTEXT)
    with LLM(str(directory), **OPTIONS) as llm:
        yield llm


def test_a_model_that_would_say_otherwise_says_what_fits(scripted):
    assert scripted.generate(["a"], SamplingParams(temperature=0.0, max_tokens=12), use_tqdm=False)[0].outputs[0].text == SCRIPT[:12]
    greedy = {"temperature": 0.0, "max_tokens": 300}
    outputs = run(scripted, [SamplingParams(**greedy, structured_outputs=constraint) for constraint, _ in CONSTRAINTS.values()])
    for (name, (_, check)), output in zip(CONSTRAINTS.items(), outputs, strict=True):
        assert output.outputs[0].finish_reason == "stop", name
        assert check(output.outputs[0].text), (name, output.outputs[0].text)


def test_an_end_mark_inside_a_grammar_ends_or_is_masked(scripted):
    grammar = 'root ::= [^<]{0,20} "</think>" [a-z ]{5}'
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=60, structured_outputs=StructuredOutputsParams(grammar=grammar))
    for output in run(scripted, [params.clone(seed=i) for i in range(6)]):
        assert re.fullmatch(r"[^<]{0,20}</think>[a-z ]{5}", output.outputs[0].text, re.DOTALL)


def test_allowed_ids_and_a_grammar_that_exclude_each_other_end_the_request_with_an_error(scripted):
    params = SamplingParams(
        max_tokens=9, allowed_token_ids=[FIRST_BYTE_ID + ord("x")], structured_outputs=StructuredOutputsParams(regex="x{2}y")
    )
    (output,) = run(scripted, [params])
    assert output.outputs[0].finish_reason == "error"
    assert output.outputs[0].text == "xx"
    assert output.error is not None
    assert "no token is left" in output.error
