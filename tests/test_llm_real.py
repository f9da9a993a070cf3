"""`LLM` over the real engine and tiny checkpoints: what parameters mean for the text that comes back."""

from __future__ import annotations

import json

import pytest

from jaxllm import LLM, BeamSearchParams, SamplingParams
from jaxllm.errors import ConfigError, InvalidRequestError, ModelLoadError, OutOfMemoryPlanError
from tests.checkpoints import FIRST_BYTE_ID, script_ids, tiny_config, write_model, write_scripted_model

pytestmark = pytest.mark.heavy

CONTEXT = 128
VOCAB = 320
# Ids of tests.checkpoints.write_tokenizer: special tokens and bytes; the model's head is padded beyond them.
KNOWN = FIRST_BYTE_ID + 256
OPTIONS = {
    "max_model_len": CONTEXT,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_logprobs": -1,
    "block_size": 16,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 2**24,
}


@pytest.fixture(scope="module")
def random_model(tmp_path_factory):
    """A random Llama with two end-of-sequence ids, whose head has more rows than the tokenizer has tokens."""
    directory = write_model(tmp_path_factory.mktemp("random"), tiny_config(vocab_size=VOCAB), seed=5)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 40], "temperature": 0.0}))
    return directory


@pytest.fixture(scope="module")
def llm(random_model):
    with LLM(str(random_model), **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    """Says SCRIPT[p] after position p, whatever the prompt."""
    directory = write_scripted_model(tmp_path_factory.mktemp("scripted"), SCRIPT, vocab_size=512, max_positions=CONTEXT)
    with LLM(str(directory), **OPTIONS) as llm:
        yield llm


SCRIPT = "héllo 😀 ABC DEFGH and more text until it ends"
SCRIPT_IDS = script_ids(SCRIPT)


def run(llm, prompt, **params):
    return llm.generate(prompt, SamplingParams(**{"temperature": 0.0, **params}), use_tqdm=False)[0].outputs[0]


def greedy(llm, prompt, **params):
    return run(llm, prompt, **{"ignore_eos": True, "max_tokens": 8, **params})


# --------------------------------------------------------------------------- scripted text


def test_the_script_comes_back_whole(scripted):
    output = run(scripted, [9], max_tokens=None)
    assert (output.text, output.finish_reason, output.stop_reason) == (SCRIPT, "stop", None)
    assert output.token_ids == [*SCRIPT_IDS, 0]


@pytest.mark.parametrize(("include", "text"), [(False, "héllo 😀 ABC "), (True, "héllo 😀 ABC DEFGH")])
def test_stop_strings(scripted, include, text):
    output = run(scripted, [9], max_tokens=None, stop=["nowhere", "DEFGH"], include_stop_str_in_output=include)
    assert (output.text, output.finish_reason, output.stop_reason) == (text, "stop", "DEFGH")


def test_stop_token_ids_and_ignore_eos(scripted):
    colon = FIRST_BYTE_ID + ord("A")
    output = run(scripted, [9], max_tokens=None, stop_token_ids=[colon])
    assert (output.text, output.stop_reason, output.token_ids[-1]) == ("héllo 😀 ", colon, colon)
    output = run(scripted, [9], max_tokens=None, ignore_eos=True)
    assert (output.finish_reason, len(output.token_ids)) == ("length", CONTEXT - 1)


def test_min_tokens_holds_off_every_end(scripted):
    letters = {FIRST_BYTE_ID + ord(char) for char in "hl"}
    output = run(scripted, [9], max_tokens=20, min_tokens=8, stop_token_ids=sorted(letters))
    assert len(output.token_ids) >= 8
    assert not letters & set(output.token_ids[:8])


def test_context_is_filled_to_the_last_token(scripted):
    output = run(scripted, [9] * (CONTEXT - 1), max_tokens=None, ignore_eos=True)
    assert (len(output.token_ids), output.finish_reason) == (1, "length")
    with pytest.raises(InvalidRequestError, match=f"{CONTEXT} tokens"):
        run(scripted, [9] * CONTEXT)


def test_logprobs_of_a_sure_token(scripted):
    output = run(scripted, [9], max_tokens=3, logprobs=2)
    for token, entry in zip(SCRIPT_IDS, output.logprobs, strict=False):
        assert next(iter(entry)) == token
        assert entry[token].logprob == pytest.approx(0.0, abs=1e-3)
        assert [value.rank for value in entry.values()] == [1, 2]
    assert output.cumulative_logprob == pytest.approx(0.0, abs=1e-2)


# --------------------------------------------------------------------------- what sampling parameters do


def test_ids_without_text_are_never_sampled_and_accepted_in_prompts(llm):
    outputs = llm.generate(
        [[KNOWN + 7, VOCAB - 1, 50]] * 8,
        [SamplingParams(temperature=2.0, seed=seed, max_tokens=100, ignore_eos=True) for seed in range(8)],
        use_tqdm=False,
    )
    tokens = {token for output in outputs for token in output.outputs[0].token_ids}
    assert len(tokens) > 150
    assert max(tokens) < KNOWN
    biased = greedy(llm, [50], logit_bias={KNOWN + 1: 100.0})
    assert max(biased.token_ids) < KNOWN


def test_extreme_but_legal_values_equal_greedy(llm):
    expected = greedy(llm, "prompt").token_ids
    for params in ({"top_p": 1e-4}, {"top_p": 1e-9}, {"top_k": 1}, {"min_p": 1.0}, {"temperature": 1e-4}):
        assert greedy(llm, "prompt", **{"temperature": 1.0, "seed": 1, **params}).token_ids == expected


@pytest.mark.parametrize("off", [{}, {"top_k": 0}, {"top_k": -1}])
def test_temperature_varies_the_output_when_nothing_cuts(llm, off):
    outputs = llm.generate(["prompt"] * 20, SamplingParams(temperature=1.0, max_tokens=8, **off), use_tqdm=False)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) > 10


def test_seeds_repeat_and_n_sequences_differ(llm):
    params = SamplingParams(temperature=1.0, seed=3, n=4, max_tokens=12, ignore_eos=True)
    first, second = (llm.generate("prompt", params, use_tqdm=False)[0] for _ in range(2))
    tokens = [tuple(sequence.token_ids) for sequence in first.outputs]
    assert tokens == [tuple(sequence.token_ids) for sequence in second.outputs]
    assert len(set(tokens)) == 4
    alone = run(llm, "prompt", temperature=1.0, seed=5, max_tokens=12, ignore_eos=True)
    assert tuple(alone.token_ids) == tokens[2]


def test_allowed_ids_biases_and_bans(llm):
    allowed = [60, 70, 80]
    assert set(greedy(llm, "prompt", allowed_token_ids=allowed).token_ids) <= set(allowed)
    assert set(greedy(llm, "prompt", logit_bias={90: 100.0}).token_ids) == {90}
    plain = greedy(llm, "prompt")
    banned = bytes([plain.token_ids[0] - FIRST_BYTE_ID]).decode("latin-1")
    if banned.isascii() and banned.strip():
        assert plain.token_ids[0] not in greedy(llm, "prompt", bad_words=[banned]).token_ids
    with pytest.raises(InvalidRequestError, match="leaves no token"):
        greedy(llm, "prompt", allowed_token_ids=[FIRST_BYTE_ID + ord("x")], bad_words=["x"])


def test_bad_words_of_several_tokens_never_appear(llm):
    a, b, c = (FIRST_BYTE_ID + ord(char) for char in "abc")
    # Only these three can come; each pair that starts with a is banned but ac.
    params = {"allowed_token_ids": [a, b, c], "max_tokens": 40, "temperature": 1.0, "seed": 2}
    assert "ab" in greedy(llm, "prompt", **params).text
    text = greedy(llm, "prompt", bad_words=["ab", "aa"], **params).text
    assert "ac" in text
    assert "ab" not in text
    assert "aa" not in text


def test_penalties_make_tokens_rarer(llm):
    plain = greedy(llm, "prompt", max_tokens=60)
    for penalty in ({"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"repetition_penalty": 1.8}):
        penalised = greedy(llm, "prompt", max_tokens=60, **penalty)
        assert len(set(penalised.token_ids)) > len(set(plain.token_ids))


def test_every_end_of_sequence_id_ends_a_request(llm):
    for token in (0, 40):
        output = run(llm, "prompt", logit_bias={token: 100.0}, max_tokens=5)
        assert (output.token_ids, output.finish_reason, output.stop_reason) == ([token], "stop", None)
        late = run(llm, "prompt", logit_bias={token: 100.0}, max_tokens=9, min_tokens=4)
        assert late.token_ids[4:] == [token]
        assert not {0, 40} & set(late.token_ids[:4])


# --------------------------------------------------------------------------- log-probabilities


def test_logprobs_agree_however_many_are_asked_for(llm):
    few, all_, named = (
        greedy(llm, "prompt", max_tokens=4, **ask) for ask in ({"logprobs": 3}, {"logprobs": -1}, {"logprob_token_ids": [50, 51]})
    )
    for position in range(4):
        best = list(few.logprobs[position].items())
        everything = all_.logprobs[position]
        assert len(everything) == VOCAB
        assert [entry.rank for _, entry in best] == [1, 2, 3]
        for token, entry in best:
            assert everything[token].logprob == pytest.approx(entry.logprob, abs=1e-4)
            assert everything[token].rank == entry.rank
        for token in (50, 51):
            assert named.logprobs[position][token].logprob == pytest.approx(everything[token].logprob, abs=1e-4)


def test_prompt_logprobs_do_not_depend_on_what_is_cached(llm):
    long = "the quick brown fox jumps over the lazy dog and goes on running for a while"
    asking = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=2)

    def scores(text):
        output = llm.generate(text, asking, use_tqdm=False)[0]
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
        return [entry[token].logprob for token, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)]

    assert llm.reset_prefix_cache()
    cold = scores(long)
    warm = scores(long)
    prefix = scores(long[:40])
    assert warm == pytest.approx(cold, abs=1e-4)
    assert prefix == pytest.approx(cold[: len(prefix)], abs=1e-4)


def test_prompt_logprobs_continue_into_the_output(llm):
    whole = llm.generate("abcdefgh", SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=-1), use_tqdm=False)[0]
    part = greedy(llm, "abcd", max_tokens=1, logprobs=-1)
    e = FIRST_BYTE_ID + ord("e")
    assert whole.prompt_logprobs[4][e].logprob == pytest.approx(part.logprobs[0][e].logprob, abs=1e-4)


def test_beam_search_is_never_worse_than_greedy(llm):
    params = BeamSearchParams(beam_width=4, max_tokens=6, ignore_eos=True)
    (output,) = llm.beam_search("prompt", params)
    scores = [beam.cum_logprob for beam in output.sequences]
    assert scores == sorted(scores, reverse=True)
    assert len({tuple(beam.tokens) for beam in output.sequences}) == 4
    assert scores[0] >= greedy(llm, "prompt", max_tokens=6, logprobs=0).cumulative_logprob - 1e-4
    for beam in output.sequences:
        prompt, continuation = beam.tokens[: len("prompt")], beam.tokens[len("prompt") :]
        scored = llm.generate(
            {"prompt_token_ids": beam.tokens}, SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0), use_tqdm=False
        )[0]
        total = sum(entry[token].logprob for token, entry in zip(continuation, scored.prompt_logprobs[len(prompt) :], strict=True))
        assert total == pytest.approx(beam.cum_logprob, abs=1e-3)


# --------------------------------------------------------------------------- caches and starts


def test_prefixes_are_cached_by_salt(llm):
    prompt = "a prompt that is long enough to fill several pages of the cache"
    assert llm.reset_prefix_cache()

    def cached(**salt):
        return llm.generate({"prompt": prompt, **salt}, SamplingParams(max_tokens=1), use_tqdm=False)[0].num_cached_tokens

    assert [cached(), cached()] == [0, 48]
    assert [cached(cache_salt="x"), cached(cache_salt="x"), cached(cache_salt="y")] == [0, 48, 0]
    assert llm.reset_prefix_cache()
    assert cached() == 0


def test_start_is_timed_by_phase(llm):
    assert list(llm.info.startup_seconds) == ["resolve", "jax", "plan", "load", "compile"]
    assert (llm.info.max_model_len, llm.info.vocab_size, llm.info.dtype, llm.info.platform) == (CONTEXT, VOCAB, "float32", "cpu")


def test_sizes_that_cannot_be_are_refused_with_what_would_work(random_model):
    with pytest.raises(ConfigError, match=r"max_model_len=1000 exceeds the 256 positions.*hf_overrides"):
        LLM(str(random_model), max_model_len=1000)
    with pytest.raises(OutOfMemoryPlanError, match="kv_cache_memory_bytes="):
        LLM(str(random_model), max_model_len=256, block_size=16, kv_cache_memory_bytes=50_000)


def test_weights_that_do_not_fit_the_config_are_refused(tmp_path):
    directory = write_model(tmp_path, tiny_config(vocab_size=VOCAB))
    with pytest.raises(ModelLoadError, match="another shape"):
        LLM(str(directory), hf_overrides={"intermediate_size": 128})
    (directory / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="safetensors"):
        LLM(str(directory))
    with LLM(str(directory), load_format="dummy", **OPTIONS) as llm:
        assert len(greedy(llm, "prompt").token_ids) == 8


@pytest.mark.parametrize(
    ("config", "asked", "expected"),
    [("bfloat16", "auto", "float32"), ("bfloat16", "bfloat16", "bfloat16"), ("float32", "half", "float16"), (None, "auto", "float32")],
)
def test_dtype_is_float32_on_cpu_unless_asked_for(tmp_path, config, asked, expected):
    directory = write_model(tmp_path, tiny_config(vocab_size=VOCAB, dtype=config))
    with LLM(str(directory), dtype=asked, **OPTIONS) as llm:
        assert llm.info.dtype == expected
        assert len(greedy(llm, "prompt").token_ids) == 8
