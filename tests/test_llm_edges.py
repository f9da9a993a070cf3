"""Requests and starts at the edge of what is allowed, through `LLM` and the real engine."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.errors import ConfigError, InvalidRequestError
from tests.checkpoints import FIRST_BYTE_ID, random_tensors, tiny_config, write_model

pytestmark = pytest.mark.heavy

CONTEXT = 64
VOCAB = 300
PROMPTS = [list(range(10, 10 + length)) for length in (1, 2, 7, 30, 50)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("model"), tiny_config(vocab_size=VOCAB), seed=5))


def start(model: str, **options: Any) -> LLM:
    sizes = {"max_model_len": CONTEXT, "max_num_seqs": 8, "max_num_batched_tokens": 32, "block_size": 8, "kv_cache_memory_bytes": 2**23}
    return LLM(model, **{"enforce_eager": True, **sizes, **options})


@pytest.fixture(scope="module")
def llm(model: str):
    with start(model) as llm:
        yield llm


def outputs_of(llm: LLM, prompts: list[Any], *params: SamplingParams) -> list[Any]:
    return [output.outputs[0] for output in llm.generate(prompts, params if len(params) > 1 else params[0], use_tqdm=False)]


def tokens_of(llm: LLM, prompts: list[Any], *params: SamplingParams) -> list[list[int]]:
    return [output.token_ids for output in outputs_of(llm, prompts, *params)]


GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[list[int]]:
    return [tokens_of(llm, [prompt], GREEDY)[0] for prompt in PROMPTS]


# --------------------------------------------------------------------------- prompts and shapes


def test_prompts_of_different_length_in_one_batch_get_their_own_tokens(llm: LLM, alone: list[list[int]]) -> None:
    assert tokens_of(llm, PROMPTS, GREEDY) == alone
    assert len({tokens[0] for tokens in alone}) > 1


@pytest.mark.parametrize(
    "sizes",
    [
        {"max_num_batched_tokens": 1},
        {"max_num_batched_tokens": 3, "max_num_seqs": 8},
        {"max_num_batched_tokens": 33, "max_num_seqs": 1},
        {"max_num_batched_tokens": 1000, "max_num_seqs": 3},
        {"block_size": 64},
        {"max_model_len": 61, "block_size": 16},
    ],
    ids=str,
)
def test_step_sizes_that_fit_nothing_evenly_serve_every_prompt(model: str, alone: list[list[int]], sizes: dict[str, int]) -> None:
    with start(model, **sizes) as llm:
        assert tokens_of(llm, PROMPTS, GREEDY) == alone


def test_a_prompt_leaves_room_for_a_token_or_is_refused_and_others_go_on(llm: LLM, alone: list[list[int]]) -> None:
    (output,) = outputs_of(llm, [[5] * (CONTEXT - 1)], SamplingParams(max_tokens=10**9, ignore_eos=True))
    assert (len(output.token_ids), output.finish_reason) == (1, "length")
    for length in (CONTEXT, CONTEXT + 1000):
        with pytest.raises(InvalidRequestError, match=f"{length} tokens"):
            llm.generate([PROMPTS[0], [5] * length], GREEDY, use_tqdm=False)
    assert tokens_of(llm, PROMPTS, GREEDY) == alone


def test_ids_outside_the_vocabulary_are_refused_and_leave_neighbours_alone(llm: LLM, alone: list[list[int]]) -> None:
    for params in ({"stop_token_ids": [VOCAB + 5], "min_tokens": 1}, {"allowed_token_ids": [VOCAB]}, {"logit_bias": {VOCAB: 1.0}}):
        with pytest.raises(InvalidRequestError, match="outside the vocabulary"):
            llm.generate(PROMPTS[:2], [GREEDY, SamplingParams(**params)], use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="outside the vocabulary"):
        llm.generate([[VOCAB]], GREEDY, use_tqdm=False)
    last = SamplingParams(temperature=0.0, max_tokens=10, min_tokens=9, stop_token_ids=[VOCAB - 1])
    assert tokens_of(llm, [*PROMPTS, PROMPTS[0]], *[GREEDY] * len(PROMPTS), last)[:-1] == alone


# --------------------------------------------------------------------------- sampling


def test_a_token_outside_the_allowed_ones_never_comes_even_if_none_is_left(llm: LLM, alone: list[list[int]]) -> None:
    a = FIRST_BYTE_ID + ord("a")
    with pytest.raises(InvalidRequestError, match="leaves no token"):
        llm.generate("x", SamplingParams(allowed_token_ids=[a], bad_words=["a"]), use_tqdm=False)

    # After one a, bad_words bans the second: that shows only on the way.
    stuck = SamplingParams(temperature=0.0, max_tokens=10, allowed_token_ids=[a], bad_words=["aa"], ignore_eos=True)
    *others, output = outputs_of(llm, [*PROMPTS, [9]], *[GREEDY] * len(PROMPTS), stuck)

    assert (output.token_ids, output.finish_reason) == ([a], "error")
    assert [other.token_ids for other in others] == alone


def test_every_end_is_held_off_until_min_tokens(llm: LLM) -> None:
    llm_ends = [0, 40, 41, 42]
    biased = SamplingParams(
        temperature=0.0, max_tokens=20, min_tokens=8, stop_token_ids=llm_ends[1:], logit_bias=dict.fromkeys(llm_ends, 90.0)
    )
    (output,) = outputs_of(llm, ["x"], biased)
    assert len(output.token_ids) == 9
    assert not set(llm_ends) & set(output.token_ids[:8])
    assert output.token_ids[8] in llm_ends


def test_values_beyond_every_type_are_served_or_refused_and_leave_neighbours_alone(llm: LLM, alone: list[list[int]]) -> None:
    extremes = [
        *({"top_k": value} for value in (VOCAB, 2**31 - 1, 2**31, 2**64, 10**40)),
        *({"repetition_penalty": value} for value in (1e-320, 1e-45, 3e38, 1e300)),
        {"top_p": 1e-320},
        {"min_p": 1e-320},
        {"temperature": 1e-320},
        {"logit_bias": {5: 1e308, 6: -1e308}},
        {"seed": 2**63 - 1},
        {"max_tokens": 10**40},
    ]
    params = [SamplingParams(**{"max_tokens": 6, "ignore_eos": True, **fields}) for fields in extremes]
    *others, last = outputs_of(llm, [*[PROMPTS[3]] * len(extremes), PROMPTS[1]], *params, GREEDY)
    assert {output.finish_reason for output in others} == {"length"}
    assert last.token_ids == alone[1]
    for fields in ({"seed": 2**63}, {"min_tokens": 10**40}, {"logprobs": 10**40}, {"truncate_prompt_tokens": 10**40}, {"n": 10**40}):
        with pytest.raises(InvalidRequestError, match=next(iter(fields))):
            llm.generate(PROMPTS[0], SamplingParams(**fields), use_tqdm=False)


CHOICES: dict[str, tuple[Any, ...]] = {
    "temperature": (0, 1e-9, 1e-4, 0.5, 1, 2),
    "top_p": (1e-9, 0.1, 0.9, 1),
    "top_k": (-1, 0, 1, 5, VOCAB, 10**9),
    "min_p": (0, 1e-9, 0.5, 1),
    "presence_penalty": (-2, 0.1, 2),
    "frequency_penalty": (-2, 0.1, 2),
    "repetition_penalty": (1e-5, 0.5, 1.1, 50),
    "seed": (-1, 0, 2**63 - 1, -(2**63)),
    "logprobs": (0, 1, 20),
    "prompt_logprobs": (0, 5),
    "stop": ("a", ["ab", "c"]),
    "stop_token_ids": ([0], [5, 6, 7], [VOCAB - 1]),
    "ignore_eos": (True,),
    "min_tokens": (1, 5),
    "bad_words": (["a"], ["ab", "cd e"]),
    "allowed_token_ids": ([5], [5, 6, 0], list(range(100)), [0, VOCAB - 1]),
    "logit_bias": ({5: 100.0}, {0: -100.0, 1: 100.0}, {VOCAB - 1: 100.0}),
    "max_tokens": (1, 2, 16, None),
    "n": (2, 3),
    "truncate_prompt_tokens": (-1, 1, 5),
    "detokenize": (False,),
    "logprob_token_ids": ([1, 2],),
    "include_stop_str_in_output": (True,),
}


def any_params(rng: random.Random) -> SamplingParams | None:
    """A quarter of the parameters set to something; None where they do not go together."""
    try:
        return SamplingParams(**{name: rng.choice(values) for name, values in CHOICES.items() if rng.random() < 0.25})
    except InvalidRequestError:
        return None


def assert_promises_are_kept(output: Any, params: SamplingParams) -> None:
    tokens = output.token_ids
    assert output.finish_reason in ("stop", "length")
    assert set(tokens) <= set(params.allowed_token_ids or range(VOCAB))
    assert max(tokens) < FIRST_BYTE_ID + 256
    assert output.logprobs is None or len(output.logprobs) == len(tokens)
    assert output.finish_reason == "length" or len(tokens) >= params.min_tokens
    if isinstance(output.stop_reason, str) and not params.min_tokens:
        assert output.text.endswith(output.stop_reason) is params.include_stop_str_in_output
    assert "a" not in output.text or params.bad_words != ["a"]


@pytest.mark.parametrize("seed", range(4))
def test_any_parameters_keep_their_promises_beside_each_other(llm: LLM, alone: list[list[int]], seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(4):
        asked = []
        while len(asked) < 12:
            params = any_params(rng)
            prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 3, 20, CONTEXT - 4, CONTEXT - 1]))]
            try:
                llm._front.input.process("asked", prompt, params)
            except InvalidRequestError:
                continue
            asked.append((prompt, params))
        outputs = llm.generate([*(prompt for prompt, _ in asked), PROMPTS[3]], [*(params for _, params in asked), GREEDY], use_tqdm=False)
        assert outputs[-1].outputs[0].token_ids == alone[3]
        for (_, params), output in zip(asked, outputs, strict=False):
            assert len(output.outputs) == params.n
            for sequence in output.outputs:
                assert_promises_are_kept(sequence, params)


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_a_penalty_in_the_generation_override_is_applied(model: str, llm: LLM, penalty: str) -> None:
    long = {"temperature": 0.0, "max_tokens": 40}
    with start(model, override_generation_config={penalty: 1.9, **long}, generation_config="vllm") as overridden:
        defaults = overridden.get_default_sampling_params()
        assert (getattr(defaults, penalty), defaults.max_tokens) == (1.9, 40)
        by_default = overridden.generate([PROMPTS[0]], use_tqdm=False)[0].outputs[0].token_ids
    assert by_default == tokens_of(llm, [PROMPTS[0]], SamplingParams(**{penalty: 1.9}, **long))[0]
    assert by_default != tokens_of(llm, [PROMPTS[0]], SamplingParams(**long))[0]


def test_an_override_that_cannot_be_applied_keeps_the_engine_from_starting(model: str) -> None:
    for override in ({"presence_penalty": 3}, {"no_repeat_ngram_size": 2}, {"typical_p": 0.5}):
        with pytest.raises(ConfigError, match=next(iter(override))):
            start(model, override_generation_config=override)


def test_constraints_that_are_not_offered_are_errors() -> None:
    for name in ("guided_decoding", "guided_json", "regex", "json_schema"):
        with pytest.raises((TypeError, InvalidRequestError), match=name):
            SamplingParams(**{name: {"type": "object"}})


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_smallest_values_equal_greedy_in_short_floats(tmp_path: Path, dtype: str) -> None:
    config = tiny_config(vocab_size=VOCAB)
    tensors = random_tensors(config, seed=5)
    # Temperatures below 0.01 mean 0.01, as in vLLM: the best token must lead by more than that.
    tensors["lm_head.weight"] *= 100
    with start(str(write_model(tmp_path, config, tensors=tensors)), dtype=dtype, enable_prefix_caching=False) as llm:
        expected = tokens_of(llm, PROMPTS, GREEDY)
        for fields in ({"temperature": 1e-4}, {"temperature": 1e-2}, {"top_p": 1e-9}, {"top_p": 1e-4}, {"min_p": 1.0}):
            assert tokens_of(llm, PROMPTS, GREEDY.clone(**{"temperature": 1.0, "seed": 3, **fields})) == expected


def test_a_float16_checkpoint_whose_family_overflows_it_runs_in_a_wider_dtype_or_is_refused(tmp_path: Path) -> None:
    directory = str(write_model(tmp_path, tiny_config("Gemma3ForCausalLM", vocab_size=VOCAB, dtype="float16")))
    with pytest.raises(ConfigError, match=r"float16.*use bfloat16 or float32"):
        start(directory, dtype="float16")
    with start(directory) as llm:
        assert llm.info.dtype == "float32"
        assert all(output.finish_reason == "length" for output in outputs_of(llm, PROMPTS, GREEDY))


# --------------------------------------------------------------------------- prompt log-probabilities


def test_prompt_logprobs_do_not_depend_on_the_order_of_overlapping_prompts(llm: LLM) -> None:
    base = list(range(20, 60))
    prompts = [base, [*base[:24], 70, 71, 72], base[:16], [*base, 80, 81]]
    asking = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=0)

    def scores(order: list[int], together: bool) -> dict[int, list[float]]:
        assert llm.reset_prefix_cache()
        chosen = [prompts[i] for i in order]
        outputs = (
            llm.generate(chosen, asking, use_tqdm=False) if together else [llm.generate([p], asking, use_tqdm=False)[0] for p in chosen]
        )
        found = {}
        for i, output in zip(order, outputs, strict=True):
            pairs = zip(prompts[i][1:], output.prompt_logprobs[1:], strict=True)
            found[i] = [entry[token].logprob for token, entry in pairs]
        return found

    expected = scores([0, 1, 2, 3], together=False)
    for order in ([3, 2, 1, 0], [2, 0, 3, 1]):
        for together in (False, True):
            found = scores(order, together)
            assert all(found[i] == pytest.approx(expected[i], abs=1e-4) for i in order)
