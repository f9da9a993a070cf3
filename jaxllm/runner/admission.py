"""From sampling parameters to the rows that are written into device slots."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxllm.runner.sampler import NEVER
from jaxllm.runner.step import AdmittedRows
from jaxllm.sampling_params import MAX_LOGIT_BIAS_ENTRIES, SamplingParams

# Rows written by one call: a fixed number, so that there is one program.
ADMIT_ROWS = 8
# Of a repetition penalty: logits divided or multiplied by it stay finite in float32.
_PENALTY_LIMITS = 1e-30, 1e30


@dataclass(frozen=True)
class SlotParams:
    """The sampler's view of one request.

    `banned` are ids that must not come next (what would complete a bad word of several tokens).
    """

    params: SamplingParams
    prompt_len: int
    seed: int
    banned: tuple[int, ...] = ()

    @property
    def wants_logprobs(self) -> bool:
        """Whether anything but the sampled tokens must be read for this request."""
        params = self.params
        return params.logprobs is not None or params.prompt_logprobs is not None or params.logprob_token_ids is not None

    def biases(self) -> list[tuple[int, float, int]]:
        """(id, value added to its logit, position of the predicted token from which on this ends)."""
        params = self.params
        entries = [(token, value, NEVER) for token, value in (params.logit_bias or {}).items()]
        entries += [(words[0], -math.inf, NEVER) for words in params.bad_words_token_ids or () if len(words) == 1]
        entries += [(token, -math.inf, NEVER) for token in self.banned]
        # An output grammar comes with masks, which put the end off as far as it lets them.
        if params.min_tokens and params.output_grammar is None:
            end = self.prompt_len + params.min_tokens
            entries += [(token, -math.inf, end) for token in {*params.eos_token_ids, *(params.stop_token_ids or ())}]
        return entries


def wants_static_logprobs(params: SamplingParams, max_logprobs: int) -> bool:
    """Whether the log-probabilities that the step itself computes are enough."""
    return params.logprobs is not None and 0 <= params.logprobs <= max_logprobs and params.logprob_token_ids is None


def wants_full_logprobs(params: SamplingParams, max_logprobs: int) -> bool:
    """Whether the whole vocabulary's log-probabilities must be read for this request."""
    asks = params.logprobs is not None or params.logprob_token_ids is not None
    return asks and not wants_static_logprobs(params, max_logprobs)


def admitted_rows(rows: Mapping[int, SlotParams], *, vocab_size: int, sink_slot: int, max_logprobs: int) -> AdmittedRows:
    """At most ADMIT_ROWS slots (slot -> parameters) as arrays for `step.admit`.

    Raises:
        ValueError: more biases than the table holds; the front refuses such requests.
    """
    words = -(-vocab_size // 32)
    arrays: dict[str, Any] = {
        "slots": np.full(ADMIT_ROWS, sink_slot, np.int32),
        "floats": np.tile(np.array([0, 1, 0, 1, 0, 0], np.float32), (ADMIT_ROWS, 1)),
        "ints": np.tile(np.array([0, 0, 0, -1], np.int32), (ADMIT_ROWS, 1)),
        "bias_ids": np.full((ADMIT_ROWS, MAX_LOGIT_BIAS_ENTRIES), vocab_size, np.int32),
        "bias_values": np.zeros((ADMIT_ROWS, MAX_LOGIT_BIAS_ENTRIES), np.float32),
        "bias_until": np.zeros((ADMIT_ROWS, MAX_LOGIT_BIAS_ENTRIES), np.int32),
        "masked": np.zeros(ADMIT_ROWS, np.bool_),
        "mask": np.zeros((ADMIT_ROWS, words), np.uint32),
    }
    out = AdmittedRows(**arrays)
    for i, (slot, request) in enumerate(rows.items()):
        _fill(out, i, slot, request, max_logprobs)
    return out


def _fill(out: Any, i: int, slot: int, request: SlotParams, max_logprobs: int) -> None:
    params = request.params
    out.slots[i] = slot
    lowest, highest = _PENALTY_LIMITS
    out.floats[i] = (
        params.temperature,
        params.top_p,
        params.min_p,
        min(max(params.repetition_penalty, lowest), highest),
        params.frequency_penalty,
        params.presence_penalty,
    )
    low, high = np.array([request.seed & 0xFFFFFFFF, (request.seed >> 32) & 0xFFFFFFFF], np.uint32).view(np.int32)
    logprobs = params.logprobs if params.logprobs is not None and wants_static_logprobs(params, max_logprobs) else -1
    out.ints[i] = (max(params.top_k, 0), high, low, logprobs)
    entries = request.biases()
    if len(entries) > MAX_LOGIT_BIAS_ENTRIES:
        raise ValueError(f"{len(entries)} biases and bans for one request; {MAX_LOGIT_BIAS_ENTRIES} fit")
    for k, (token, value, until) in enumerate(entries):
        out.bias_ids[i, k], out.bias_values[i, k], out.bias_until[i, k] = token, value, until
    if params.allowed_token_ids is not None:
        out.masked[i] = True
        out.mask[i] = bitmask(params.allowed_token_ids, out.mask.shape[1])


def bitmask(ids: Sequence[int], words: int) -> np.ndarray:
    """[words] uint32 with the bits of `ids` set, lowest first."""
    bits = np.zeros(words * 32, np.bool_)
    bits[np.asarray(ids, np.int64)] = True
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)
