from __future__ import annotations

import pytest

from jaxllm.core_types import EngineInfo
from jaxllm.engine import wire
from jaxllm.engine.generation_config import GenerationDefaults
from jaxllm.engine.input_processor import InputProcessor
from jaxllm.errors import InvalidRequestError, NotSupportedError
from jaxllm.sampling_params import MAX_STOP_CHARS, ReasoningMarks, SamplingParams

VOCAB = 300


class CharTokenizer:
    """One id per character (its code point); a beginning-of-sequence id 1. Ids from 256 on have no text."""

    vocab_size = 256

    def encode(self, text, add_special_tokens=True):
        return [1] * add_special_tokens + [min(ord(char), 255) for char in text]


@pytest.fixture
def processor():
    return make()


def make(max_logprobs=20, max_model_len=32, eos=(2,), vocab_size=VOCAB, priorities=False):
    info = EngineInfo(
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        page_size=16,
        num_pages=10,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        dtype="float32",
        platform="cpu",
    )
    return InputProcessor(info, CharTokenizer(), GenerationDefaults({}, list(eos)), max_logprobs=max_logprobs, priorities=priorities)


def test_every_form_of_a_prompt_gives_the_same_ids(processor):
    ids = [1, ord("h"), ord("i")]
    prompts = ["hi", ids, tuple(ids), {"prompt": "hi"}, {"prompt_token_ids": ids}, {"prompt_token_ids": ids, "prompt": "hi"}]
    requests = [processor.process("r", prompt, SamplingParams()) for prompt in prompts]
    assert [r.prompt_token_ids for r in requests] == [ids] * 6
    assert [r.prompt for r in requests] == ["hi", None, None, "hi", None, "hi"]
    assert processor.process("r", "hi", SamplingParams(), add_special_tokens=False).prompt_token_ids == ids[1:]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "empty"),
        ({}, "either prompt or prompt_token_ids"),
        (7, "got int"),
        (b"hi", "got bytes"),
        ([1, "a"], "integers, got str"),
        ([1, True], "integers, got bool"),
        ([1, -1], "0 or more, got -1"),
        ([VOCAB], "outside the vocabulary of 300"),
        ({"prompt": 3}, "must be a string"),
        ({"promt": "hi"}, "unknown key 'promt'"),
        ({"prompt": "hi", "cache_salt": ""}, "cache_salt"),
        ("\ud800", "lone surrogate"),
    ],
)
def test_prompts_that_cannot_be_served_are_refused(processor, prompt, message):
    with pytest.raises(InvalidRequestError, match=message):
        processor.process("r", prompt, SamplingParams())


def test_any_number_of_thinking_tokens_reaches_the_engine(processor):
    marks = ReasoningMarks(starts=["<think>"], ends=["</think>"], closing="</think>")
    request = processor.process("r", "hi", SamplingParams(max_tokens=20, thinking_token_budget=10**30, reasoning_marks=marks))
    (child,) = request.children

    assert wire.decode_request(wire.encode(child)).sampling_params.thinking_token_budget == 20


def test_what_every_sequence_takes_along_is_bounded(processor):
    stop = ["x" * MAX_STOP_CHARS] * 4
    assert len(processor.process("r", "hi", SamplingParams(n=1900, max_tokens=9, stop=stop)).children) == 1900
    with pytest.raises(InvalidRequestError, match="n=2100 sequences") as error:
        processor.process("r", "hi", SamplingParams(n=2100, max_tokens=9, stop=stop))
    assert error.value.param == "n"
    for long in ("x" * (MAX_STOP_CHARS + 1), ["x" * (MAX_STOP_CHARS + 1)]):
        with pytest.raises(InvalidRequestError, match="stop"):
            SamplingParams(stop=long)
    assert SamplingParams(allowed_token_ids=[7, 5] * 1000).allowed_token_ids == [7, 5]


@pytest.mark.parametrize("field", ["stop", "bad_words"])
def test_lone_surrogates_are_no_text(processor, field):
    with pytest.raises(InvalidRequestError, match=f"{field} holds a lone surrogate"):
        processor.process("r", "hi", SamplingParams(**{field: ["a\ud800"]}))
    with pytest.raises(InvalidRequestError, match="cache_salt holds a lone surrogate"):
        processor.process("r", "hi", SamplingParams(), cache_salt="\ud800")


def test_prompts_of_features_not_built_are_named(processor):
    with pytest.raises(NotSupportedError, match="multi_modal_data"):
        processor.process("r", {"prompt": "hi", "multi_modal_data": {"image": 1}}, SamplingParams())


def test_prompt_as_long_as_the_context_is_refused_and_one_shorter_gets_one_token(processor):
    with pytest.raises(InvalidRequestError, match=r"32 tokens.*context holds 32.*at most 31"):
        processor.process("r", [5] * 32, SamplingParams())
    with pytest.raises(InvalidRequestError, match="1032 tokens"):
        processor.process("r", [5] * 1032, SamplingParams())
    assert processor.process("r", [5] * 31, SamplingParams()).sampling_params.max_tokens == 1


def test_max_tokens_is_bounded_by_the_context(processor):
    assert processor.process("r", [5] * 12, SamplingParams(max_tokens=10**9)).sampling_params.max_tokens == 20
    assert processor.process("r", [5] * 12, SamplingParams(max_tokens=None)).sampling_params.max_tokens == 20
    assert processor.process("r", [5] * 12, SamplingParams(max_tokens=3)).sampling_params.max_tokens == 3
    with pytest.raises(InvalidRequestError, match="min_tokens=25 cannot be reached"):
        processor.process("r", [5] * 12, SamplingParams(max_tokens=30, min_tokens=25))


def test_truncation_keeps_the_end_of_the_prompt(processor):
    ids = list(range(10, 60))
    assert processor.process("r", ids, SamplingParams(truncate_prompt_tokens=3)).prompt_token_ids == [57, 58, 59]
    assert len(processor.process("r", ids, SamplingParams(truncate_prompt_tokens=-1, max_tokens=10)).prompt_token_ids) == 22
    assert len(processor.process("r", ids, SamplingParams(truncate_prompt_tokens=-1, max_tokens=None)).prompt_token_ids) == 31
    with pytest.raises(InvalidRequestError, match="truncate_prompt_tokens=33 exceeds"):
        processor.process("r", ids, SamplingParams(truncate_prompt_tokens=33))


@pytest.mark.parametrize("salt", ["", "a" * 129, "a@b", "a/b", "a\\b", "a\0b", 5])
def test_bad_cache_salts_are_refused(processor, salt):
    with pytest.raises(InvalidRequestError, match="cache_salt"):
        processor.process("r", "hi", SamplingParams(), cache_salt=salt)


def test_cache_salt_comes_from_prompt_or_argument(processor):
    def salt(prompt, **options):
        return processor.process("r", prompt, SamplingParams(), **options).children[0].cache_salt

    assert salt({"prompt": "hi", "cache_salt": "s"}) == "s"
    assert salt("hi", cache_salt="t" * 128) == "t" * 128
    with pytest.raises(InvalidRequestError, match="given twice"):
        salt({"prompt": "hi", "cache_salt": "s"}, cache_salt="t")


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_logprobs_are_bounded_by_max_logprobs_and_the_vocabulary(name):
    def ask(value, max_logprobs):
        make(max_logprobs).process("r", "hi", SamplingParams(**{name: value}))

    ask(20, 20)
    ask(-1, -1)
    ask(-1, 1000)
    ask(300, -1)
    for value, limit in [(21, 20), (-1, 20), (10**9, 20), (301, -1), (301, 1000)]:
        with pytest.raises(InvalidRequestError, match=name):
            ask(value, limit)


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids", "logprob_token_ids", "logit_bias"])
def test_ids_outside_the_vocabulary_are_refused(processor, field):
    for bad in (VOCAB, VOCAB + 5):
        value = {3: 1.0, bad: 1.0} if field == "logit_bias" else [3, bad]
        with pytest.raises(InvalidRequestError, match=f"{field} holds token id {bad}"):
            processor.process("r", "hi", SamplingParams(**{field: value}))
    with pytest.raises(InvalidRequestError, match="-1"):
        processor.process("r", "hi", SamplingParams(logit_bias={-1: 1.0}))


def test_logprobs_beside_logprob_token_ids_must_agree(processor):
    processor.process("r", "hi", SamplingParams(logprobs=2, logprob_token_ids=[3, 4]))
    with pytest.raises(InvalidRequestError, match="logprobs=1 differs from the 2 ids"):
        processor.process("r", "hi", SamplingParams(logprobs=1, logprob_token_ids=[3, 4]))


def test_bad_words_are_tokenised_with_and_without_a_leading_space(processor):
    params = processor.process("r", "hi", SamplingParams(bad_words=["ab", " ab", "c", "\n"])).sampling_params
    a, b, c, space = ord("a"), ord("b"), ord("c"), ord(" ")
    assert params.bad_words_token_ids == [[a, b], [space, a, b], [c], [space, c], [10], [space, 10]]
    with pytest.raises(InvalidRequestError, match=r"130 token sequences.*at most 128"):
        processor.process("r", "hi", SamplingParams(bad_words=[f"w{i}" for i in range(65)]))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bad_words", [f"w{i}" for i in range(10**5)]),
        ("bad_words", ["w" * 10**6]),
        ("logit_bias", dict.fromkeys(range(10**5), 1.0)),
    ],
)
def test_what_would_take_long_to_read_is_refused_by_its_size(field, value):
    with pytest.raises(InvalidRequestError, match=rf"{field}(\[0\])? must be (array|str|object) of length <="):
        SamplingParams(**{field: value})


def test_sampler_table_bounds_bias_and_bans_together():
    processor = make(vocab_size=5000)
    bias = dict.fromkeys(range(1024), 1.0)
    processor.process("r", "hi", SamplingParams(logit_bias=bias))
    with pytest.raises(InvalidRequestError, match="1025 entries"):
        processor.process("r", "hi", SamplingParams(logit_bias=bias, bad_words=["x"]))


def test_a_request_that_leaves_no_token_to_sample_is_refused(processor):
    x = ord("x")
    cases = [
        SamplingParams(allowed_token_ids=[x], bad_words=["x"]),
        SamplingParams(allowed_token_ids=[2], min_tokens=1),
        SamplingParams(allowed_token_ids=[x], stop_token_ids=[x], min_tokens=1),
        SamplingParams(allowed_token_ids=[256, 299]),
    ]
    for params in cases:
        with pytest.raises(InvalidRequestError, match="leaves no token"):
            processor.process("r", "hi", params)
    processor.process("r", "hi", SamplingParams(allowed_token_ids=[x, 2], min_tokens=1))
    processor.process("r", [299], SamplingParams())


def test_eos_ids_reach_the_engine_and_bad_words_do_not_come_from_users():
    processor = make(eos=(2, 7))
    forged = SamplingParams(bad_words_token_ids=[[3]], eos_token_ids=[9])
    params = processor.process("r", "hi", forged).sampling_params
    assert params.eos_token_ids == [2, 7]
    assert params.bad_words_token_ids is None


def test_n_fans_out_into_children_with_their_own_seeds():
    processor = make(priorities=True)
    request = processor.process("r", "hi", SamplingParams(n=3, seed=5), priority=2, deadline=9.5)
    assert [child.request_id for child in request.children] == ["0_r", "1_r", "2_r"]
    assert [child.sampling_params.seed for child in request.children] == [5, 6, 7]
    assert {(child.sampling_params.n, child.priority, child.deadline) for child in request.children} == {(1, 2, 9.5)}
    assert request.sampling_params.n == 3
    assert [child.request_id for child in processor.process("r", "hi", SamplingParams()).children] == ["r"]
    wrapped = processor.process("r", "hi", SamplingParams(n=2, seed=2**63 - 1))
    assert [child.sampling_params.seed for child in wrapped.children] == [2**63 - 1, -(2**63)]


def test_prompt_logprobs_are_computed_once_for_n_sequences(processor):
    request = processor.process("r", "hi", SamplingParams(n=3, prompt_logprobs=1))
    assert [child.sampling_params.prompt_logprobs for child in request.children] == [1, None, None]
    assert request.sampling_params.prompt_logprobs == 1


def test_memory_of_one_request_is_bounded():
    processor = make(max_model_len=100_000)
    with pytest.raises(InvalidRequestError, match="n=16384 sequences"):
        processor.process("r", "hi", SamplingParams(n=16384, max_tokens=None))
    with pytest.raises(InvalidRequestError, match="n must be int <= 16384, got 5000000"):
        SamplingParams(n=5_000_000)


def test_users_parameters_are_copied_and_checked_again(processor):
    params = SamplingParams(max_tokens=None)
    request = processor.process("r", "hi", params)
    assert params.max_tokens is None
    assert request.sampling_params is not params
    params.temperature = 5
    with pytest.raises(InvalidRequestError, match="temperature"):
        processor.process("r", "hi", params)
    with pytest.raises(InvalidRequestError, match="sampling_params must be SamplingParams"):
        processor.process("r", "hi", {"temperature": 1})


def test_priorities_need_an_engine_that_heeds_them(processor):
    processor.process("r", "hi", SamplingParams(), priority=0)
    with pytest.raises(InvalidRequestError, match="scheduling_policy='priority'"):
        processor.process("r", "hi", SamplingParams(), priority=1)
    for priority in (1.5, True, 2**63, -(2**63) - 1):
        with pytest.raises(InvalidRequestError, match="priority must be a 64-bit integer"):
            make(priorities=True).process("r", "hi", SamplingParams(), priority=priority)


@pytest.mark.parametrize("top_k", [10**6, 2**31, 2**64, 10**40])
def test_a_top_k_beyond_the_vocabulary_is_all_of_it(processor, top_k):
    (child,) = processor.process("r", "hi", SamplingParams(top_k=top_k)).children
    assert child.sampling_params.top_k == VOCAB
