"""The device side of the engine: takes scheduled steps, keeps the arrays, gives back tokens."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import CompileConfig
from jaxllm.core_types import ErrorKind, NewRow, RowResult, ScheduledRow, SchedulerOutput, StepResult, TokenLogprobs
from jaxllm.models.build import ModelDef
from jaxllm.ops.attention import AttentionBackend
from jaxllm.runner.admission import ADMIT_ROWS, SlotParams, admitted_rows, wants_full_logprobs, wants_static_logprobs
from jaxllm.runner.base import Runner
from jaxllm.runner.batch import BatchBuilder, decodes_first
from jaxllm.runner.buckets import Bucket, bucket_ladder, pooling_ladder
from jaxllm.runner.compile import BucketPrograms, CompileGuard
from jaxllm.runner.memory import Limits, MemoryPlan, abstract_caches
from jaxllm.runner.mesh import Placement
from jaxllm.runner.roofline import Roofline
from jaxllm.runner.sampler import SamplerOutput, SlotState
from jaxllm.runner.step import StepOutput, StepProgram, StepState, WaitingRows, admit, attend_groups, count_history
from jaxllm.sampling_params import MAX_LOGIT_BIAS_ENTRIES

logger = logging.getLogger(__name__)

# Most log-probabilities that the step itself computes for each row; requests for more read the whole vocabulary.
_STEP_LOGPROBS = 20
# Rows that a scoring program takes at once: bounds its [rows, V] logits.
_SCORED_ROWS = 32
# Rows that wait are sampled so many at a time, so that there is one program for each number of rows in a step.
_WAITING_ROWS = 32

NOT_FINITE = "the model's logits are not finite: activations overflowed the dtype; start with --dtype bfloat16 or float32"
NO_TOKEN_LEFT = (
    "no token is left to sample: allowed_token_ids, bad_words, structured_outputs and stop ids held off by min_tokens exclude every one"
)


class ModelRunner(Runner):
    """Implements `core_types.Executor` on the devices of a mesh.

    Args:
        model_def: the model.
        params: its parameters, in the order of `model_def.names`.
        plan: page pools and longest sequence.
        limits: rows and tokens of a step.
        num_sampled_ids: ids from here on are never sampled: the tokenizer has no text for them.
    """

    def __init__(
        self,
        model_def: ModelDef,
        params: Sequence[jax.Array],
        plan: MemoryPlan,
        limits: Limits,
        placement: Placement,
        backend: AttentionBackend,
        compile_config: CompileConfig,
        *,
        num_sampled_ids: int,
    ):
        self.cache_spec = plan.cache_spec
        self.guard = CompileGuard()
        self._params = list(params)
        self._placement = placement
        self._vocab_size = model_def.vocab_size
        self._max_model_len = plan.max_model_len
        self._max_logprobs = min(_STEP_LOGPROBS, model_def.vocab_size)
        self._batches = BatchBuilder(plan.cache_spec, limits.max_num_seqs, plan.max_model_len)
        self._slots: dict[int, SlotParams] = {}
        self.program = StepProgram(
            model_def=model_def,
            backend=backend,
            placement=placement,
            groups=attend_groups(plan.cache_spec),
            num_sampled_ids=num_sampled_ids,
            max_logprobs=self._max_logprobs,
        )
        self._abstract_params = [jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=p.sharding) for p in self._params]
        self._abstract_state = self._state_shapes(model_def, plan, limits, backend)
        buckets = bucket_ladder(limits.max_num_seqs, limits.max_num_batched_tokens)
        self._programs = BucketPrograms(buckets, self._compile_step, self.guard, lazy=compile_config.enforce_eager)
        # Of an encoder, where there is one: it takes whole inputs, as pooling models do.
        ladder = pooling_ladder(limits.max_num_seqs, limits.max_num_batched_tokens) if plan.cache_spec.encoder_group else ()
        self._encoder_programs = BucketPrograms(ladder, self._compile_encoder, self.guard, lazy=compile_config.enforce_eager or not ladder)
        self._ladders = (self._programs, self._encoder_programs)
        self._admit = jax.jit(admit, donate_argnums=0)
        # By number of rows: what samples those that wait, and how the steps' logits lie.
        self._sample_programs: dict[int, Any] = {}
        self._logits_shardings: dict[int, jax.sharding.Sharding] = {}
        self._sample_lock = threading.Lock()
        self._count_history = jax.jit(count_history, donate_argnums=0)
        self._logprobs_of_rows = jax.jit(self.program.logprobs_of_rows)
        self._full_logprobs_of_rows = jax.jit(self.program.full_logprobs_of_rows)
        self._state: StepState | None = None
        # Donation makes the state change hands with every call: one caller at a time.
        self._lock = threading.Lock()

    def _state_shapes(self, model_def: ModelDef, plan: MemoryPlan, limits: Limits, backend: AttentionBackend) -> StepState:
        caches = abstract_caches(model_def, backend, self._placement, plan.cache_spec)
        slots = SlotState.shapes(limits.max_num_seqs, model_def.vocab_size, MAX_LOGIT_BIAS_ENTRIES)
        everywhere = self._placement.sharding()
        return StepState(caches, jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere), slots))

    def _compile_step(self, bucket: Bucket) -> Any:
        layout = self._batches.layout(bucket)
        packed = jax.ShapeDtypeStruct((layout.size,), jnp.int32, sharding=self._placement.sharding())
        step = jax.jit(functools.partial(self.program.step, layout=layout), donate_argnums=1)
        program = step.lower(self._abstract_params, self._abstract_state, packed).compile()
        self._logits_shardings[bucket.num_rows] = program.output_shardings[1].logits
        if self._state is not None:
            # Not needed to begin with.
            self._sample_program(bucket.num_rows)
        return program

    def _compile_encoder(self, bucket: Bucket) -> Any:
        layout, group = self._batches.encoder_layout(bucket), self.cache_spec.encoder_group
        assert group is not None
        packed = jax.ShapeDtypeStruct((layout.size,), jnp.int32, sharding=self._placement.sharding())
        caches = self._abstract_state.caches
        shardings = jax.tree.map(lambda leaf: leaf.sharding, caches), packed.sharding
        encode = functools.partial(self.program.encode, layout=layout, layers=group.layers)
        program = jax.jit(encode, donate_argnums=1, out_shardings=shardings)
        return program.lower(self._abstract_params, caches, packed).compile()

    def _sample_program(self, num_rows: int) -> Any:
        """What samples waiting rows of a step of so many rows; compiled by whoever needs it first."""
        with self._sample_lock, self.guard.expected():
            program = self._sample_programs.get(num_rows)
            if program is None:
                logits = jax.ShapeDtypeStruct((num_rows, self._vocab_size), jnp.float32, sharding=self._logits_shardings[num_rows])
                sample = jax.jit(self.program.sample_waiting, donate_argnums=0)
                waiting = self._waiting_rows(num_rows, (), (), ())
                program = sample.lower(self._abstract_state.slots, logits, waiting).compile()
                self._sample_programs[num_rows] = program
            return program

    def _waiting_rows(self, num_rows: int, places: Sequence[int], rows: Sequence[ScheduledRow], masks: Sequence[np.ndarray]) -> WaitingRows:
        """Rows of a step of `num_rows`, at the same places where there is room for all of the step, and padding."""
        size = min(num_rows, _WAITING_ROWS)
        fields, samples = np.zeros((3, size), np.int32), np.zeros(size, np.bool_)
        fields[1] = self._batches.sink_slot
        allowed = np.zeros((size, -(-self._vocab_size // 32)), np.uint32)
        for i, place, row, mask in zip(_at(places, num_rows), places, rows, masks, strict=True):
            fields[:, i], samples[i], allowed[i] = (place, row.slot, row.start + row.num_tokens), True, mask
        return WaitingRows(fields[0], fields[1], fields[2], samples, allowed)

    # ----------------------------------------------------------------------------------------------------------------- start

    def warm_up(self) -> int:
        """Compile what serving needs at least, and allocate the state. Returns the bytes of temporaries that the largest step needs
        (0 where steps are compiled when they are needed).
        """
        temporaries = max(self._programs.compile_first(), self._encoder_programs.compile_first())
        with self.guard.expected():
            self._state = jax.jit(
                lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self._abstract_state),
                out_shardings=jax.tree.map(lambda leaf: leaf.sharding, self._abstract_state),
            )()
            # Writing to the sink slot only: compiles the small programs without an effect.
            self._write_slots({})
            self._write_history(self._batches.sink_slot, [], 0)
        return temporaries

    @property
    def roofline(self) -> Roofline:
        """The work of steps of this model, for what benchmarks compare with."""
        return Roofline.of(self.program.model_def, self.program.backend, self._placement, self.cache_spec.page_size)

    # ------------------------------------------------------------------------------------------------------------------ step

    def execute(self, step: SchedulerOutput) -> _PendingStep:
        """Write admitted requests into their slots, pack the batch and enqueue it. Returns before the device is done."""
        with self._lock, self.guard.watching():
            self._admit_rows(step)
            encoded = self._encode([row for row in step.new_rows if row.encoder_token_ids])
            order = decodes_first(step.rows)
            rows = [step.rows[i] for i in order]
            bucket, program = self._programs.get(step.num_tokens, len(rows))
            packed = self._batches.pack(rows, bucket)
            self._state, output = program(self._params, self._state, packed)
            return _PendingStep(self, rows, order, bucket, output, encoded)

    def _encode(self, rows: Sequence[NewRow]) -> _Encoded | None:
        """Run the encoder for rows that were admitted; returns at once."""
        if not rows:
            return None
        assert self._state is not None
        bucket, program = self._encoder_programs.get(sum(len(row.encoder_token_ids) for row in rows), len(rows))
        caches, finite = program(self._params, self._state.caches, self._batches.pack_encoder(rows, bucket))
        self._state = self._state._replace(caches=caches)
        finite.copy_to_host_async()
        return [row.slot for row in rows], finite

    def _admit_rows(self, step: SchedulerOutput) -> None:
        changed: dict[int, SlotParams] = {}
        for row in step.new_rows:
            self._batches.admit(row)
            changed[row.slot] = SlotParams(row.sampling_params, row.prompt_len, row.seed)
            if row.sampling_params.needs_penalties:
                self._write_history(row.slot, row.token_ids, row.prompt_len)
        for slot, banned in step.banned_token_ids.items():
            request = changed.get(slot) or self._slots[slot]
            changed[slot] = SlotParams(request.params, request.prompt_len, request.seed, tuple(banned))
        self._slots.update(changed)
        items = list(changed.items())
        for start in range(0, len(items), ADMIT_ROWS):
            self._write_slots(dict(items[start : start + ADMIT_ROWS]))

    def _sample_waiting(
        self, logits: jax.Array, places: list[int], rows: Sequence[ScheduledRow], masks: Sequence[np.ndarray]
    ) -> SamplerOutput:
        """Sample rows of a step that is on the device, at most `_WAITING_ROWS`; returns at once."""
        with self._lock, self.guard.watching():
            assert self._state is not None
            waiting = self._waiting_rows(logits.shape[0], places, rows, masks)
            slots, sampled = self._sample_program(logits.shape[0])(self._state.slots, logits, waiting)
            self._state = self._state._replace(slots=slots)
            return sampled

    def _write_slots(self, rows: dict[int, SlotParams]) -> None:
        assert self._state is not None
        arrays = admitted_rows(rows, vocab_size=self._vocab_size, sink_slot=self._batches.sink_slot, max_logprobs=self._max_logprobs)
        self._state = self._state._replace(slots=self._admit(self._state.slots, arrays))

    def _write_history(self, slot: int, token_ids: Sequence[int], prompt_len: int) -> None:
        assert self._state is not None
        tokens = np.zeros(self._max_model_len, np.int32)
        tokens[: len(token_ids)] = token_ids
        counts = (np.int32(slot), tokens, np.int32(prompt_len), np.int32(len(token_ids)))
        self._state = self._state._replace(slots=self._count_history(self._state.slots, *counts))

    def shutdown(self) -> None:
        super().shutdown()
        self._state = None

    # --------------------------------------------------------------------------------------------------------------- results

    def _score(self, hidden: jax.Array, rows: Sequence[int], targets: Sequence[int], count: int) -> list[TokenLogprobs]:
        """Log-probabilities of `targets` and the `count` best ids after the hidden states `rows`, a bounded number at a time."""
        out: list[TokenLogprobs] = []
        whole = count < 0 or count > self._max_logprobs
        size = _SCORED_ROWS if not whole else 1 + _SCORED_ROWS // 8
        for start in range(0, len(rows), size):
            part, wanted = list(rows[start : start + size]), list(targets[start : start + size])
            padded = np.array(part + [0] * (size - len(part)), np.int32)
            with self.guard.expected():
                if whole:
                    full = np.asarray(self._full_logprobs_of_rows(self._params, hidden, padded))
                    out += [_from_full(full[i], token, count, None) for i, token in enumerate(wanted)]
                else:
                    ids, values, rank = self._logprobs_of_rows(
                        self._params, hidden, padded, np.array(wanted + [0] * (size - len(part)), np.int32)
                    )
                    out += _from_step(np.asarray(ids), np.asarray(values), np.asarray(rank), len(part), count)
        return out


# Slots whose encoder inputs a step begins with, and whether all of each was finite.
_Encoded = tuple[list[int], jax.Array]


class _PendingStep:
    """A step on the device; `result` waits for it."""

    def __init__(
        self,
        runner: ModelRunner,
        rows: list[ScheduledRow],
        order: list[int],
        bucket: Bucket,
        output: StepOutput,
        encoded: _Encoded | None = None,
    ):
        self._runner = runner
        self._rows = rows
        self._order = order
        self._bucket = bucket
        self._output = output
        self._encoded = encoded
        # Slots may get new owners before the results are read.
        self._params = [runner._slots[row.slot] for row in rows]
        self._known = [runner._batches.known_tokens(row.slot) for row in rows]
        self._wants_logprobs = any(request.wants_logprobs for request in self._params)
        # Rows that waited, and what was sampled for them.
        self._waited: list[tuple[list[int], SamplerOutput]] = []
        self._copy(output.sampled)
        if not any(row.waits for row in rows):
            self._output = output._replace(logits=None)

    def _copy(self, sampled: SamplerOutput) -> None:
        for array in sampled if self._wants_logprobs else (sampled.tokens, sampled.finite, sampled.choosable):
            array.copy_to_host_async()

    def sample(self, masks: dict[int, np.ndarray]) -> None:
        """See `StepHandle`."""
        waiting = [i for i, row in enumerate(self._rows) if row.waits and row.slot in masks]
        logits = self._output.logits
        assert logits is not None
        for start in range(0, len(waiting), _WAITING_ROWS):
            places = waiting[start : start + _WAITING_ROWS]
            rows = [self._rows[i] for i in places]
            sampled = self._runner._sample_waiting(logits, places, rows, [masks[row.slot] for row in rows])
            self._copy(sampled)
            self._waited.append((places, sampled))
        self._output = self._output._replace(logits=None)

    def _read(self, name: str) -> np.ndarray:
        """An array of the sampler's output, over all rows."""
        found = np.asarray(getattr(self._output.sampled, name))
        if self._waited:
            found = found.copy()
            for places, sampled in self._waited:
                found[places] = np.asarray(getattr(sampled, name))[_at(places, self._bucket.num_rows)]
        return found

    def result(self) -> StepResult:
        tokens, choosable = self._read("tokens"), self._read("choosable")
        # Of the hidden states too.
        finite = np.asarray(self._output.sampled.finite)
        slots, whole = self._encoded or ([], np.empty(0))
        broken = {slot for slot, is_whole in zip(slots, np.asarray(whole), strict=False) if not is_whole}
        results = [RowResult() for _ in self._rows]
        sampled = {place for places, _ in self._waited for place in places}
        columns = zip(self._rows, self._order, tokens.tolist(), finite.tolist(), choosable.tolist(), strict=False)
        for i, (row, place, token, is_finite, is_choosable) in enumerate(columns):
            if not is_finite or row.slot in broken:
                results[place].error = NOT_FINITE
            elif not row.samples or (row.waits and i not in sampled):
                continue
            elif not is_choosable:
                results[place].error, results[place].error_kind = NO_TOKEN_LEFT, ErrorKind.INVALID
            else:
                results[place].token_id = token
        if self._wants_logprobs:
            with self._runner.guard.watching():
                self._add_logprobs(results, tokens)
                self._add_prompt_logprobs(results)
        return StepResult(results, self._bucket.num_tokens)

    def _add_logprobs(self, results: list[RowResult], tokens: np.ndarray) -> None:
        runner, limit = self._runner, self._runner._max_logprobs
        arrays: tuple[np.ndarray, ...] | None = None
        for i, request in enumerate(self._params):
            params = request.params
            if results[self._order[i]].token_id is None:
                continue
            if wants_static_logprobs(params, limit):
                if arrays is None:
                    arrays = self._read("top_ids"), self._read("top_logprobs"), self._read("rank")
                ids, values, rank = (array[i : i + 1] for array in arrays)
                (results[self._order[i]].logprobs,) = _from_step(ids, values, rank, 1, params.logprobs or 0)
            elif wants_full_logprobs(params, limit):
                last = sum(r.num_tokens for r in self._rows[: i + 1]) - 1
                with runner.guard.expected():
                    rows = np.array([last], np.int32)
                    full = np.asarray(runner._full_logprobs_of_rows(runner._params, self._output.hidden, rows))[0]
                count = -1 if params.logprobs is None else params.logprobs
                results[self._order[i]].logprobs = _from_full(full, int(tokens[i]), count, params.logprob_token_ids)

    def _add_prompt_logprobs(self, results: list[RowResult]) -> None:
        first = 0
        for i, (row, request) in enumerate(zip(self._rows, self._params, strict=True)):
            count = request.params.prompt_logprobs
            # The hidden state at position p predicts the token at p + 1; the last one of the prompt predicts the output.
            predicted = self._known[i][row.start + 1 : min(row.start + row.num_tokens + 1, request.prompt_len)]
            if count is not None and predicted and results[self._order[i]].error is None:
                rows = range(first, first + len(predicted))
                results[self._order[i]].prompt_logprobs = self._runner._score(self._output.hidden, rows, predicted, count)
            first += row.num_tokens


def _at(places: list[int] | Sequence[int], num_rows: int) -> Sequence[int]:
    """Where rows at `places` of a step of `num_rows` stand among those that waited."""
    return places if num_rows <= _WAITING_ROWS else range(len(places))


def _from_step(ids: np.ndarray, values: np.ndarray, rank: np.ndarray, rows: int, count: int) -> list[TokenLogprobs]:
    size = 1 + count
    return [TokenLogprobs(ids[i, :size].tolist(), values[i, :size].tolist(), int(rank[i])) for i in range(rows)]


def _from_full(logprobs: np.ndarray, token: int, count: int, token_ids: Sequence[int] | None) -> TokenLogprobs:
    """logprobs [V]: the token's, then those of `token_ids` where given, else of the `count` best (-1: all)."""
    rank = int(np.sum(logprobs > logprobs[token])) + 1
    if token_ids is not None:
        chosen = np.asarray(token_ids, np.int64)
    else:
        chosen = np.argsort(-logprobs, kind="stable")
        chosen = chosen if count < 0 else chosen[:count]
    ids = [token, *chosen.tolist()]
    return TokenLogprobs(ids, logprobs[ids].tolist(), rank)
