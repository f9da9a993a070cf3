"""Sampling on the device against numpy."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.runner.admission import SlotParams, admitted_rows
from jaxllm.runner.sampler import SlotState, _best, _penalise, sample
from jaxllm.runner.step import admit, count_history
from jaxllm.sampling_params import MAX_LOGIT_BIAS_ENTRIES, SamplingParams

VOCAB, SLOTS, PROMPT_LEN = 70, 4, 5


@pytest.fixture(scope="module")
def programs():
    run = jax.jit(functools.partial(sample, num_sampled_ids=VOCAB, max_logprobs=20))
    return run, jax.jit(admit), jax.jit(count_history)


def empty_state() -> SlotState:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), SlotState.shapes(SLOTS, VOCAB, MAX_LOGIT_BIAS_ENTRIES))


class Sampler:
    """Draws for one row after another from the real programs."""

    def __init__(self, programs):
        self.run, self.admit, self.count = programs
        self.state = empty_state()

    def set(self, slot: int, params: SamplingParams, history=(), banned=(), seed=0):
        rows = {slot: SlotParams(params, PROMPT_LEN, seed, tuple(banned))}
        arrays = admitted_rows(rows, vocab_size=VOCAB, sink_slot=SLOTS, max_logprobs=20)
        self.state = self.admit(self.state, arrays)
        if params.needs_penalties:
            tokens = np.zeros(64, np.int32)
            tokens[: len(history)] = history
            self.state = self.count(self.state, np.int32(slot), tokens, np.int32(PROMPT_LEN), np.int32(len(history)))

    def draw(self, logits, position=PROMPT_LEN, slots=(0,)):
        rows = np.asarray(slots, np.int32)
        logits = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (len(rows), VOCAB))
        where = np.full(len(rows), position, np.int32)
        out, self.state = self.run(logits, rows, where, np.ones(len(rows), bool), self.state)
        return out

    def support(self, logits, draws=400) -> set[int]:
        """Ids drawn at many positions."""
        return {int(self.draw(logits, position).tokens[0]) for position in range(10, 10 + draws)}


@pytest.fixture
def sampler(programs) -> Sampler:
    return Sampler(programs)


def logits_of(probabilities) -> np.ndarray:
    out = np.full(VOCAB, -30.0, np.float32)
    out[: len(probabilities)] = np.log(probabilities)
    return out


def test_greedy_takes_the_best(sampler):
    sampler.set(0, SamplingParams(temperature=0.0))
    logits = np.random.default_rng(0).normal(size=VOCAB)
    assert int(sampler.draw(logits).tokens[0]) == logits.argmax()
    assert int(sampler.state.last_token[0]) == logits.argmax()


@pytest.mark.parametrize("size", [1, 70, 127, 128, 129, 255, 256])
@pytest.mark.parametrize("vocab_size", [256, 300])
def test_the_best_is_the_first_of_those_that_may_be_sampled(vocab_size, size):
    logits = np.random.default_rng(size).normal(size=(64, vocab_size)).astype(np.float32)
    logits[:, size:] += 10
    logits[::2] = np.round(logits[::2])  # many are equal
    best, there = _best(jnp.asarray(logits), size)
    assert (np.asarray(best) == logits[:, :size].argmax(1)).all()
    assert there.all()
    assert not _best(jnp.full((1, vocab_size), -jnp.inf), size)[1]


@pytest.mark.parametrize(
    ("params", "want"),
    [
        ({}, {0, 1, 2, 3}),
        ({"top_k": 2}, {0, 1}),
        ({"top_k": -1}, {0, 1, 2, 3}),
        ({"top_k": 1000}, {0, 1, 2, 3}),
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.51}, {0, 1}),
        ({"top_p": 0.85}, {0, 1, 2}),
        ({"top_p": 1e-9}, {0}),
        ({"min_p": 0.25}, {0, 1}),
        ({"min_p": 1.0}, {0}),
        # top_p counts what top_k left: 0.5 of (0.5 + 0.3) is already 0.62.
        ({"top_k": 2, "top_p": 0.6}, {0}),
        ({"temperature": 0.01}, {0}),
        ({"temperature": 1e-4}, {0}),
        ({"temperature": 2.0, "top_p": 1e-4}, {0}),
    ],
)
def test_the_support_of_a_draw(sampler, params, want):
    sampler.set(0, SamplingParams(**params))
    assert sampler.support(logits_of([0.5, 0.3, 0.12, 0.08])) == want


def test_ties_at_the_threshold_are_kept(sampler):
    sampler.set(0, SamplingParams(top_k=2))
    assert sampler.support(logits_of([0.4, 0.2, 0.2, 0.2])) == {0, 1, 2, 3}


def test_draws_follow_the_distribution(sampler):
    sampler.set(0, SamplingParams(seed=1, temperature=1.0))
    wanted = np.array([0.5, 0.3, 0.15, 0.05])
    drawn = [int(sampler.draw(logits_of(wanted), position).tokens[0]) for position in range(3000)]
    assert np.abs(np.bincount(drawn, minlength=4)[:4] / len(drawn) - wanted).max() < 0.03


def test_seed_and_position_make_the_draw(sampler):
    flat = np.zeros(VOCAB)
    sampler.set(0, SamplingParams(), seed=2**40 + 1)
    first = [int(sampler.draw(flat, p).tokens[0]) for p in range(20)]
    sampler.set(1, SamplingParams(), seed=2**40 + 1)
    assert [int(sampler.draw(flat, p, slots=(1,)).tokens[0]) for p in range(20)] == first
    sampler.set(0, SamplingParams(), seed=1)
    assert [int(sampler.draw(flat, p).tokens[0]) for p in range(20)] != first


def test_bias_bans_and_min_tokens(sampler):
    logits = logits_of([0.6, 0.3, 0.1])
    sampler.set(0, SamplingParams(temperature=0.0, logit_bias={2: 50.0}))
    assert int(sampler.draw(logits).tokens[0]) == 2
    sampler.set(0, SamplingParams(temperature=0.0, bad_words_token_ids=[[0], [1, 2]]))
    assert int(sampler.draw(logits).tokens[0]) == 1
    sampler.set(0, SamplingParams(temperature=0.0), banned=(0, 1))
    assert int(sampler.draw(logits).tokens[0]) == 2
    sampler.set(0, SamplingParams(temperature=0.0, min_tokens=3, eos_token_ids=[0], stop_token_ids=[1]))
    drawn = [int(sampler.draw(logits, PROMPT_LEN + i).tokens[0]) for i in range(5)]
    assert drawn == [2, 2, 2, 0, 0]


def test_allowed_ids_are_the_only_ones(sampler):
    sampler.set(0, SamplingParams(allowed_token_ids=[33, 64, 69]))
    assert sampler.support(np.zeros(VOCAB)) == {33, 64, 69}
    # The next request in the slot is free again.
    sampler.set(0, SamplingParams(temperature=0.0))
    assert int(sampler.draw(logits_of([1.0])).tokens[0]) == 0


def test_penalties_equal_their_formulas(sampler):
    rng = np.random.default_rng(1)
    logits = rng.normal(size=VOCAB).astype(np.float32) * 3
    prompt, output = [1, 2, 3, 4, 5], [5, 6, 6, 6, 7]
    params = SamplingParams(temperature=0.0, repetition_penalty=1.7, frequency_penalty=0.6, presence_penalty=-0.4, logprobs=20)
    sampler.set(0, params, history=prompt + output)

    counts = np.bincount(output, minlength=VOCAB)
    seen = np.isin(np.arange(VOCAB), prompt + output)
    want = np.where(seen, np.where(logits > 0, logits / 1.7, logits * 1.7), logits) - 0.6 * counts + 0.4 * (counts > 0)
    slots = jnp.array([0])
    got = _penalise(jnp.asarray(logits)[None], slots, sampler.state.floats[slots], jnp.array([True]), sampler.state)
    np.testing.assert_allclose(got[0], want, atol=1e-5)
    assert int(sampler.draw(logits).tokens[0]) == want.argmax()


@pytest.mark.parametrize(("penalty", "expected"), [(1e-320, 7), (1e-45, 7), (1e-30, 7), (1e30, 9), (3e38, 9), (1e300, 9)])
@pytest.mark.parametrize("temperature", [0.0, 0.01])
def test_extreme_repetition_penalties_decide_and_nothing_overflows(sampler, penalty, expected, temperature):
    sampler.set(0, SamplingParams(temperature=temperature, repetition_penalty=penalty), history=[7, 7, 7, 7, 7, 8])
    logits = np.zeros(VOCAB, np.float32)
    logits[7:10] = 3.0, 2.0, 1.0
    assert int(sampler.draw(logits).tokens[0]) == expected


def test_counts_follow_what_is_sampled(sampler):
    params = SamplingParams(temperature=0.0, frequency_penalty=1.0)
    sampler.set(0, params, history=[1, 2, 3, 4, 5])
    logits = np.full(VOCAB, -50.0)
    logits[[10, 11]] = [2.5, 1.0]
    drawn = [int(sampler.draw(logits, PROMPT_LEN + i).tokens[0]) for i in range(5)]
    # 2.5 1.5 0.5 against 1.0 0.0: two of the first, then they take turns.
    assert drawn == [10, 10, 11, 10, 11]


def test_logprobs_are_raw_and_ranked(sampler):
    rng = np.random.default_rng(2)
    logits = rng.normal(size=VOCAB).astype(np.float32)
    target = int(np.argsort(-logits)[6])
    sampler.set(0, SamplingParams(temperature=0.0, logprobs=4, logit_bias={target: 100.0}))
    out = sampler.draw(logits)
    logprobs = logits - np.log(np.exp(logits).sum())
    assert int(out.tokens[0]) == target
    assert int(out.rank[0]) == 7
    np.testing.assert_array_equal(out.top_ids[0, :5], [target, *np.argsort(-logits)[:4]])
    np.testing.assert_allclose(out.top_logprobs[0, :5], logprobs[np.asarray(out.top_ids[0, :5])], atol=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_overflow_is_told_for_its_row_only(sampler, bad):
    for slot in range(2):
        sampler.set(slot, SamplingParams(temperature=0.0))
    logits = np.zeros((2, VOCAB), np.float32)
    logits[0, 3] = bad
    out, _ = sampler.run(logits, np.array([0, 1], np.int32), np.full(2, 9, np.int32), np.ones(2, bool), sampler.state)
    assert out.finite.tolist() == [False, True]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_nothing_left_to_choose_is_told_apart(sampler, temperature):
    sampler.set(0, SamplingParams(temperature=temperature, allowed_token_ids=[7, 8]), banned=[7, 8])
    sampler.set(1, SamplingParams(temperature=temperature, allowed_token_ids=[7, 8]), banned=[7])
    out = sampler.draw(np.zeros(VOCAB), slots=(0, 1))
    assert out.choosable.tolist() == [False, True]
    assert out.finite.tolist() == [True, True]
    assert out.tokens[1] == 8


def test_ids_without_text_are_never_drawn():
    run = jax.jit(functools.partial(sample, num_sampled_ids=50, max_logprobs=5))
    state = empty_state()
    arrays = admitted_rows({0: SlotParams(SamplingParams(temperature=2.0), 1, 0)}, vocab_size=VOCAB, sink_slot=SLOTS, max_logprobs=5)
    state = admit(state, arrays)
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, 50:] = 20.0
    drawn = {int(run(logits, np.zeros(1, np.int32), np.full(1, p, np.int32), np.ones(1, bool), state)[0].tokens[0]) for p in range(60)}
    assert max(drawn) < 50


def test_more_biases_than_the_table_holds_are_an_error():
    params = SamplingParams(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS_ENTRIES), 1.0))
    with pytest.raises(ValueError, match="1025 biases"):
        admitted_rows({0: SlotParams(params, 1, 0, banned=(5,))}, vocab_size=VOCAB, sink_slot=SLOTS, max_logprobs=5)
