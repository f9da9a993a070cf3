from __future__ import annotations

import itertools
import math
import random

import pytest

from jaxllm.engine.beam_search import BeamSearch
from jaxllm.outputs import Logprob
from jaxllm.sampling_params import BeamSearchParams

EOS = 0


def next_logprobs(tokens, vocabulary=5):
    """A made-up language model: log-probabilities of the next token, fixed by the sequence."""
    rng = random.Random(str(tokens))
    weights = [rng.random() ** 3 + 1e-3 for _ in range(vocabulary)]
    return [math.log(weight / sum(weights)) for weight in weights]


def top(tokens, count):
    logprobs = next_logprobs(tokens)
    best = sorted(range(len(logprobs)), key=lambda token: -logprobs[token])[:count]
    return {token: Logprob(logprobs[token]) for token in best}


def search(prompt, params, max_model_len=100):
    beams, steps = BeamSearch(prompt, params, eos_token_ids=[EOS], max_model_len=max_model_len), 0
    while beams.live:
        beams.expand([top(beam.tokens, 2 * params.beam_width) for beam in beams.live])
        steps += 1
    return beams.result(), steps


def every_sequence(prompt, max_tokens, length_penalty):
    """Scores of all sequences that end with EOS or at the limit, best first."""
    found = []
    for length in range(1, max_tokens + 1):
        for output in itertools.product(range(5), repeat=length):
            ended = output[-1] == EOS
            if EOS in output[:-1] or (not ended and length < max_tokens):
                continue
            tokens, total = list(prompt), 0.0
            for token in output:
                total += next_logprobs(tokens)[token]
                tokens.append(token)
            kept = tokens[:-1] if ended else tokens
            found.append((total / len(kept) ** length_penalty, kept))
    return sorted(found, reverse=True)


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0, -1.0])
def test_a_wide_search_finds_the_best_sequences_of_all(length_penalty):
    params = BeamSearchParams(beam_width=128, max_tokens=3, length_penalty=length_penalty)
    result, _ = search([3, 4], params)
    expected = every_sequence([3, 4], 3, length_penalty)
    assert [beam.tokens for beam in result[:20]] == [tokens for _, tokens in expected[:20]]


def test_width_one_is_greedy():
    result, _ = search([2], BeamSearchParams(beam_width=1, max_tokens=6, ignore_eos=True))
    tokens = [2]
    for _ in range(6):
        logprobs = next_logprobs(tokens)
        tokens.append(logprobs.index(max(logprobs)))
    assert result[0].tokens == tokens
    assert result[0].finish_reason == "length"
    assert len(result[0].logprobs) == 6


def test_end_of_sequence_is_kept_only_on_request():
    plain, _ = search([2], BeamSearchParams(beam_width=3, max_tokens=5, length_penalty=0.0))
    kept, _ = search([2], BeamSearchParams(beam_width=3, max_tokens=5, length_penalty=0.0, include_stop_str_in_output=True))
    assert [(b.cum_logprob, b.finish_reason) for b in plain] == [(b.cum_logprob, b.finish_reason) for b in kept]
    for bare, full in zip(plain, kept, strict=True):
        assert full.tokens == bare.tokens + [EOS] * (bare.finish_reason == "stop")
    assert any(beam.finish_reason == "stop" for beam in plain)


def test_the_context_ends_a_search():
    result, steps = search([1, 2, 3], BeamSearchParams(beam_width=2, max_tokens=50, ignore_eos=True), max_model_len=7)
    assert steps == 4
    assert {len(beam.tokens) for beam in result} == {7}


def test_a_search_stops_when_no_live_beam_can_win():
    sure = {EOS: Logprob(-0.01), 1: Logprob(-5.0)}
    beams = BeamSearch([1], BeamSearchParams(beam_width=1, max_tokens=1000, length_penalty=0.0), eos_token_ids=[EOS], max_model_len=2000)
    beams.expand([sure])
    assert beams.live == []
    assert beams.result()[0].cum_logprob == -0.01
