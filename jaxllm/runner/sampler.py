"""Sampling on the device, per row: what the slots carry, and how a row of logits becomes a token.

Order (vLLM's): raw log-probabilities, allowed ids, bans and biases (bad words, min_tokens, logit_bias), repetition, frequency and presence
penalties, temperature, min_p, top_k, top_p, sample.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

NEVER = jnp.iinfo(jnp.int32).max
_GREEDY_BELOW = 1e-5
_BLOCK = 128


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlotState:
    """What the sampler keeps for each of S slots (the last one is the sink of padding rows).

    last_token: [S] int32, the token sampled last.
    floats: [S, 6] float32: temperature, top_p, min_p, repetition, frequency and presence penalty.
    ints: [S, 4] int32: top_k (0 = off), two halves of the seed, number of log-probabilities wanted (-1 = none).
    bias_ids, bias_values, bias_until: [S, B] int32, float32, int32: value added to a token's logit while the position of the predicted
        token is below `until`; -inf bans. Unused entries have id V.
    masked: [S] bool, whether the row of `mask` applies.
    mask: [S, ceil(V / 32)] uint32, allowed ids, bit by bit.
    prompt_ids: [S, ceil(V / 32)] uint32, ids seen in the prompt. output_counts: [S, V] int16. Both kept only for rows with penalties.
    """

    last_token: jax.Array
    floats: jax.Array
    ints: jax.Array
    bias_ids: jax.Array
    bias_values: jax.Array
    bias_until: jax.Array
    masked: jax.Array
    mask: jax.Array
    prompt_ids: jax.Array
    output_counts: jax.Array

    @staticmethod
    def shapes(num_slots: int, vocab_size: int, max_bias: int) -> SlotState:
        """Abstract arrays for `num_slots` requests."""
        slots, words = num_slots + 1, -(-vocab_size // 32)

        def array(dtype: Any, *shape: int) -> Any:
            return jax.ShapeDtypeStruct((slots, *shape), dtype)

        return SlotState(
            last_token=array(jnp.int32),
            floats=array(jnp.float32, 6),
            ints=array(jnp.int32, 4),
            bias_ids=array(jnp.int32, max_bias),
            bias_values=array(jnp.float32, max_bias),
            bias_until=array(jnp.int32, max_bias),
            masked=array(jnp.bool_),
            mask=array(jnp.uint32, words),
            prompt_ids=array(jnp.uint32, words),
            output_counts=array(jnp.int16, vocab_size),
        )


class SamplerOutput(NamedTuple):
    """tokens [R] int32; finite [R] bool; choosable [R] bool, whether bans and masks left any token; top_ids [R, 1 + N] and top_logprobs
    [R, 1 + N]: the sampled token, then the N best (zeros where no row wants them); rank [R] of the sampled token.
    """

    tokens: jax.Array
    finite: jax.Array
    choosable: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array
    rank: jax.Array


def sample(
    raw: jax.Array,
    slots: jax.Array,
    positions: jax.Array,
    samples: jax.Array,
    state: SlotState,
    *,
    num_sampled_ids: int,
    max_logprobs: int,
) -> tuple[SamplerOutput, SlotState]:
    """Sample a token for each row, and bring the state up to date: `choose` and `advance`."""
    out = choose(raw, slots, positions, samples, state, num_sampled_ids=num_sampled_ids, max_logprobs=max_logprobs)
    return out, advance(state, slots, samples, out.tokens)


def choose(
    raw: jax.Array,
    slots: jax.Array,
    positions: jax.Array,
    samples: jax.Array,
    state: SlotState,
    allowed: jax.Array | None = None,
    *,
    num_sampled_ids: int,
    max_logprobs: int,
) -> SamplerOutput:
    """Sample a token for each row. Rows know nothing of each other.

    Args:
        raw: [R, V] float32 logits.
        slots: [R] slot of each row.
        positions: [R] position of the token being predicted.
        samples: [R] bool; of the others nobody wants a token.
        num_sampled_ids: ids from here on are never sampled.
        max_logprobs: static bound of the log-probabilities returned.
        allowed: [R, ceil(V / 32)] uint32, the ids that each row may sample, bit by bit; None: all.
    """
    floats, ints = state.floats[slots], state.ints[slots]
    temperature = floats[:, 0]
    greedy = temperature < _GREEDY_BELOW
    until = jnp.where(samples[:, None], state.bias_until[slots], 0)
    biased = jnp.any(positions[:, None] < until, axis=1)
    penalised = _penalised(floats)
    special = samples & (biased | penalised | state.masked[slots] | ~greedy)
    vocab_size = raw.shape[-1]
    size = min(num_sampled_ids, vocab_size)

    # Branches begin with the raw logits, so that no copy of them is made where one pass is enough.
    def usable(raw: jax.Array) -> jax.Array:
        return raw if allowed is None else jnp.where(bits_of(allowed, vocab_size), raw, -jnp.inf)

    def best(raw: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _best(usable(raw), size)

    def chosen(raw: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = usable(raw) if size == vocab_size else jnp.where(jnp.arange(vocab_size) < size, usable(raw), -jnp.inf)
        # Each passes over all rows of the vocabulary, and most batches need one of them.
        logits = lax.cond(jnp.any(samples & state.masked[slots]), lambda x: _apply_mask(x, slots, state), lambda x: x, logits)
        logits = lax.cond(jnp.any(samples & biased), lambda x: _bias(x, slots, positions, state), lambda x: x, logits)
        choosable = jnp.max(logits, axis=-1) > -jnp.inf
        logits = lax.cond(jnp.any(samples & penalised), lambda x: _penalise(x, slots, floats, penalised, state), lambda x: x, logits)
        tokens = lax.cond(
            jnp.any(samples & ~greedy),
            lambda logits: jnp.where(greedy, _best(logits, size)[0], _draw(logits, floats, ints, positions)),
            lambda logits: _best(logits, size)[0],
            logits,
        )
        return tokens, choosable

    def nothing(raw: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.zeros(raw.shape[:1], jnp.int32), jnp.ones(raw.shape[:1], jnp.bool_)

    # Where all rows of a step wait for their masks, nothing is sampled yet.
    tokens, choosable = lax.switch(jnp.any(samples).astype(jnp.int32) + jnp.any(special), (nothing, best, chosen), raw)
    top_ids, top_logprobs, rank = lax.cond(
        jnp.any(samples & (ints[:, 3] >= 0)),
        lambda raw, tokens: top_logprobs_of(raw, tokens, max_logprobs),
        lambda raw, tokens: _no_logprobs(tokens, max_logprobs),
        raw,
        tokens,
    )
    # One pass tells overflow: NaN and +inf both survive a maximum. Rows that waited were told of before.
    finite = jnp.isfinite(jnp.max(raw, axis=-1)) if allowed is None else jnp.ones_like(choosable)
    return SamplerOutput(tokens, finite, choosable, top_ids, top_logprobs, rank)


def _best(logits: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """The first of the best of the first `size` ids under logits [R, V]: ids [R] int32; and whether there is one: [R] bool.

    The best block comes first, by plain maxima: on CPU that is ten times as fast as carrying indices through the whole vocabulary. Slices
    stay outside of them: fused with these loops, they cost several times what the maxima do.
    """
    whole = size // _BLOCK
    padded = jnp.pad(logits, ((0, 0), (0, -logits.shape[1] % _BLOCK)), constant_values=-jnp.inf)
    blocks = padded.reshape(len(logits), -1, _BLOCK)
    highest = jnp.max(blocks, axis=-1)[:, :whole]
    if size % _BLOCK:
        highest = jnp.concatenate([highest, jnp.max(logits[:, whole * _BLOCK : size], axis=-1, keepdims=True)], axis=1)
    block = jnp.argmax(highest, axis=-1)[:, None]
    ids = block * _BLOCK + jnp.arange(_BLOCK)
    inside = jnp.where(ids < size, jnp.take_along_axis(blocks, block[:, None], axis=1)[:, 0], -jnp.inf)
    best = jnp.take_along_axis(ids, jnp.argmax(inside, axis=-1, keepdims=True), axis=1)[:, 0]
    return best.astype(jnp.int32), jnp.max(inside, axis=-1) > -jnp.inf


def advance(state: SlotState, slots: jax.Array, samples: jax.Array, tokens: jax.Array) -> SlotState:
    """The state with last tokens and counts brought up to date; slots, samples and tokens [R]. Only rows that sample change it."""
    counted = samples & _penalised(state.floats[slots])
    return replace(
        state,
        last_token=state.last_token.at[slots].set(jnp.where(samples, tokens, state.last_token[slots])),
        output_counts=state.output_counts.at[slots, tokens].add(counted.astype(jnp.int16)),
    )


def _penalised(floats: jax.Array) -> jax.Array:
    """Which rows of SlotState.floats [R, 6] have penalties."""
    return jnp.any(floats[:, 3:] != jnp.array([1.0, 0.0, 0.0]), axis=1)


def top_logprobs_of(logits: jax.Array, tokens: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-probabilities of `tokens` [R] and of the `count` best ids under logits [R, V].

    Returns:
        ids [R, 1 + count], log-probabilities [R, 1 + count], rank of `tokens` [R] (1 = best; ties share the better rank).
    """
    normaliser = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)
    best, best_ids = lax.top_k(logits, min(count, logits.shape[-1]))
    rank = jnp.sum(logits > chosen, axis=-1).astype(jnp.int32) + 1
    ids = jnp.concatenate([tokens[:, None], best_ids.astype(jnp.int32)], axis=1)
    return ids, jnp.concatenate([chosen, best], axis=1) - normaliser, rank


def _no_logprobs(tokens: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    shape = (tokens.shape[0], 1 + count)
    return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32), jnp.zeros_like(tokens)


def bits_of(words: jax.Array, size: int) -> jax.Array:
    """Bits of [R, ceil(size / 32)] uint32, lowest first, as [R, size] bool."""
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1 != 0
    return bits.reshape(words.shape[0], -1)[:, :size]


def _apply_mask(logits: jax.Array, slots: jax.Array, state: SlotState) -> jax.Array:
    allowed = bits_of(state.mask[slots], logits.shape[-1]) | ~state.masked[slots][:, None]
    return jnp.where(allowed, logits, -jnp.inf)


def _bias(logits: jax.Array, slots: jax.Array, positions: jax.Array, state: SlotState) -> jax.Array:
    values = jnp.where(positions[:, None] < state.bias_until[slots], state.bias_values[slots], 0.0)
    return jax.vmap(lambda row, ids, add: row.at[ids].add(add, mode="drop"))(logits, state.bias_ids[slots], values)


def _penalise(logits: jax.Array, slots: jax.Array, floats: jax.Array, penalised: jax.Array, state: SlotState) -> jax.Array:
    """Repetition (Keskar et al., arXiv 1909.05858) on prompt and output, frequency and presence on output only."""
    repetition, frequency, presence = (floats[:, i : i + 1] for i in (3, 4, 5))
    counts = state.output_counts[slots].astype(jnp.float32)
    seen = bits_of(state.prompt_ids[slots], logits.shape[-1]) | (counts > 0)
    out = jnp.where(seen, jnp.where(logits > 0, logits / repetition, logits * repetition), logits)
    out = out - frequency * counts - presence * (counts > 0)
    return jnp.where(penalised[:, None], out, logits)


def _draw(logits: jax.Array, floats: jax.Array, ints: jax.Array, positions: jax.Array) -> jax.Array:
    """Temperature, min_p, top_k, top_p, and a draw by the Gumbel trick with a key of seed and position: [R] ids.

    Neither threshold sorts the vocabulary: both are found by bisection over the bit patterns of the probabilities, which order as
    the probabilities do; 31 halvings end at the exact value.
    """
    temperature, top_p, min_p = floats[:, 0:1], floats[:, 1:2], floats[:, 2:3]
    top_k = ints[:, 0:1]
    # Subtracted before the division, the best token has exactly 0 however large logits are: it survives every cut below.
    scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / jnp.maximum(temperature, _GREEDY_BELOW)
    weights = jnp.exp(scaled)  # relative to the best token, which has weight 1
    weights = jnp.where(weights >= min_p, weights, 0.0)

    def keep_top_k(weights: jax.Array) -> jax.Array:
        wanted = jnp.where(top_k > 0, top_k, weights.shape[-1])
        floor = _highest(weights, lambda kept: jnp.sum(kept > 0, axis=-1, keepdims=True) >= wanted)
        return jnp.where(weights >= floor, weights, 0.0)

    def keep_top_p(weights: jax.Array) -> jax.Array:
        wanted = jnp.where(top_p < 1.0, top_p, jnp.inf) * jnp.sum(weights, axis=-1, keepdims=True)
        floor = _highest(weights, lambda kept: jnp.sum(kept, axis=-1, keepdims=True) >= wanted)
        return jnp.where(weights >= floor, weights, 0.0)

    weights = lax.cond(jnp.any(top_k > 0), keep_top_k, lambda w: w, weights)
    weights = lax.cond(jnp.any(top_p < 1.0), keep_top_p, lambda w: w, weights)
    scores = jnp.where(weights > 0, scaled, -jnp.inf)

    def noise(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed.astype(jnp.uint32), impl="threefry2x32")
        return jax.random.gumbel(jax.random.fold_in(key, position), logits.shape[-1:], jnp.float32)

    return _best(scores + jax.vmap(noise)(ints[:, 1:3], positions), logits.shape[-1])[0]


def _highest(weights: jax.Array, enough) -> jax.Array:
    """[R, 1]: the highest floor such that `enough(weights at or above it)`; 0 where not even all of them are."""
    bits = lax.bitcast_convert_type(weights, jnp.int32)
    low = jnp.zeros((weights.shape[0], 1), jnp.int32)  # always enough, or nothing is
    high = jnp.full_like(low, lax.bitcast_convert_type(jnp.float32(1.0), jnp.int32) + 1)  # never

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        good = enough(jnp.where(bits >= middle, weights, 0.0))
        return jnp.where(good, middle, low), jnp.where(good, high, middle)

    low, _ = lax.fori_loop(0, 31, halve, (low, high))
    return lax.bitcast_convert_type(low, jnp.float32)
