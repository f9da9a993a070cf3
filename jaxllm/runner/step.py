"""The compiled step, and the small programs beside it. Everything here is traced.

    step(params, state, packed) -> (state, StepOutput)

substitutes last sampled tokens (they stay on the device), embeds, runs the layers, gathers one row a request, and samples. `state` is
donated: pages and slots are updated in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from jaxllm.core_types import CacheSpec
from jaxllm.models.build import ModelDef
from jaxllm.ops.attention import AttentionBackend, Cache
from jaxllm.ops.attention.segments import Segments, attend_segments
from jaxllm.ops.moe import sharded_experts
from jaxllm.runner.batch import LAST_SAMPLED, BatchLayout, StepBatch, unpack
from jaxllm.runner.memory import GroupKey, group_of
from jaxllm.runner.mesh import Placement
from jaxllm.runner.sampler import SamplerOutput, SlotState, advance, choose, top_logprobs_of
from jaxllm.specs import AttendSpec

T = TypeVar("T")


class StepState(NamedTuple):
    """What lives on the device between steps: the pages of each layer, and the slots."""

    caches: tuple[Cache, ...]
    slots: SlotState


class StepOutput(NamedTuple):
    """sampled: per row. hidden [T, M]: after the final norm, for the programs that score prompts; read only when asked for.
    logits [R, V] float32: for rows that are sampled later; let go as soon as there are none.
    """

    sampled: SamplerOutput
    hidden: jax.Array
    logits: jax.Array | None


class WaitingRows(NamedTuple):
    """Rows of a step that are sampled once it is known what may come. rows [N]: their place in the step; slots, positions [N]: as in
    `sample`; samples [N] bool: False for padding. allowed [N, ceil(V / 32)] uint32: the ids that may come, bit by bit.
    """

    rows: jax.Array | np.ndarray
    slots: jax.Array | np.ndarray
    positions: jax.Array | np.ndarray
    samples: jax.Array | np.ndarray
    allowed: jax.Array | np.ndarray


def attend_groups(spec: CacheSpec) -> dict[GroupKey, int]:
    """Where the cache groups are, by what `group_of` says of their layers."""
    return {(group.kind, group.window): g for g, group in enumerate(spec.groups)}


@dataclass(frozen=True, eq=False)
class StepProgram:
    """What a step is compiled from, beside its bucket.

    groups: see `attend_groups`.
    num_sampled_ids: ids from here on are never sampled (a vocabulary padded past the tokenizer).
    """

    model_def: ModelDef
    backend: AttentionBackend
    placement: Placement
    groups: dict[GroupKey, int]
    num_sampled_ids: int
    max_logprobs: int

    def step(
        self, params: Sequence[jax.Array], state: StepState, packed: jax.Array, *, layout: BatchLayout
    ) -> tuple[StepState, StepOutput]:
        """One step of a bucket. packed: [layout.size] int32."""
        batch = self._everywhere(unpack(packed, layout))
        row = jnp.minimum(batch.token_rows, layout.bucket.num_rows - 1)
        tokens = jnp.where(batch.tokens == LAST_SAMPLED, state.slots.last_token[batch.slots[row]], batch.tokens)

        model = self.model_def.bind(params)
        experts = sharded_experts(self.placement.mesh, experts_axis="expert", width_axis="model")
        hidden, caches = model(tokens, batch.positions, state.caches, self._attend(batch), rows=batch.states, experts=experts)
        logits = model.logits(hidden[batch.last_tokens])
        if self.placement.mesh.size == 1:
            # By rows: on CPU products come out transposed, and passes over such logits take many times as long as turning them once.
            logits = with_layout_constraint(logits, Layout((0, 1)))
        sampled = self._sample(logits, batch.slots, batch.next_positions, batch.samples, state.slots)
        slots = self._everywhere(advance(state.slots, batch.slots, batch.samples, sampled.tokens))
        sampled = sampled._replace(finite=sampled.finite & _finite_rows(hidden, batch))
        return StepState(tuple(caches), slots), StepOutput(sampled, hidden, logits)

    def encode(
        self, params: Sequence[jax.Array], caches: Sequence[Cache], packed: jax.Array, *, layout: BatchLayout, layers: Sequence[int]
    ) -> tuple[tuple[Cache, ...], jax.Array]:
        """Run the encoder on whole inputs and keep what the decoder reads of them.

        Args:
            packed: [layout.size] int32, see `BatchBuilder.pack_encoder`.
            layers: which caches are the encoder's.

        Returns:
            The caches, and whether everything is finite [R] bool.
        """
        batch = self._everywhere(unpack(packed, layout))
        (metadata,) = batch.metadata
        segments, mesh = Segments.of(metadata.q_starts, layout.bucket.num_tokens), self.placement.mesh
        attend = partial(attend_segments, segments, mesh, "model")
        hidden, kept = self.model_def.bind(params).encode(batch.tokens, batch.positions, attend)
        new = list(caches)
        for layer, (k, v) in zip(layers, kept, strict=True):
            new[layer] = self.backend.store(k, v, new[layer], metadata, mesh=mesh, heads_axis="model")
        return tuple(new), _finite_rows(hidden, batch)

    def sample_waiting(self, slots: SlotState, logits: jax.Array, waiting: WaitingRows) -> tuple[SlotState, SamplerOutput]:
        """Sample `waiting` rows of a step's logits [R, V]."""
        rows, at, positions, samples, allowed = self._everywhere(tuple(map(jnp.asarray, waiting)))
        # As many as the step has are in its order: no copy.
        logits = logits[rows] if rows.shape[0] < logits.shape[0] else logits
        sampled = self._sample(logits, at, positions, samples, slots, allowed)
        return self._everywhere(advance(slots, at, samples, sampled.tokens)), sampled

    def _sample(
        self, logits: jax.Array, slots: jax.Array, positions: jax.Array, samples: jax.Array, state: SlotState, *allowed: jax.Array
    ) -> SamplerOutput:
        """A token for each row of logits [R, V]. Devices share the rows where they can: sampling holds several copies of its logits."""
        mesh, rules, shards = self.placement.mesh, self.placement.rules, self.placement.num_shards
        sampler = partial(choose, num_sampled_ids=self.num_sampled_ids, max_logprobs=self.max_logprobs)
        if mesh.size > 1:
            if logits.shape[1] % shards == 0:
                # Said outright: the compiler would rather gather the head's weights than pass the logits on.
                logits = lax.with_sharding_constraint(logits, self.placement.sharding((None, "vocab")))
            rows = rules.partition(("rows",) if logits.shape[0] % shards == 0 else ())
            specs = (rows, rows, rows, rows, rules.partition(()), *[rows for _ in allowed])
            sampler = jax.shard_map(sampler, mesh=mesh, in_specs=specs, out_specs=rows, check_vma=False)
        return self._everywhere(sampler(logits, slots, positions, samples, state, *allowed))

    def _everywhere(self, tree: T) -> T:
        """Small arrays that every device has: otherwise the compiler shares them out, and gathers them again."""
        return lax.with_sharding_constraint(tree, self.placement.sharding()) if self.placement.mesh.size > 1 else tree

    def _attend(self, batch: StepBatch):
        def attend(
            q: jax.Array,
            k: jax.Array | None,
            v: jax.Array | None,
            cache: Cache,
            spec: AttendSpec,
            sinks: jax.Array | None = None,
            bias: jax.Array | None = None,
        ) -> tuple[jax.Array, Cache]:
            metadata = batch.metadata[self.groups[group_of(spec)]]
            return self.backend.attend(q, k, v, cache, metadata, spec, sinks, bias, mesh=self.placement.mesh, heads_axis="model")

        return attend

    def logprobs_of_rows(
        self, params: Sequence[jax.Array], hidden: jax.Array, rows: jax.Array, targets: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """`top_logprobs_of` the `targets` [N] that follow the hidden states `rows` [N] of hidden [T, M]."""
        return top_logprobs_of(self.model_def.bind(params).logits(hidden[rows]), targets, self.max_logprobs)

    def full_logprobs_of_rows(self, params: Sequence[jax.Array], hidden: jax.Array, rows: jax.Array) -> jax.Array:
        """[N, V] log-probabilities of the whole vocabulary after `rows` [N] of hidden [T, M]."""
        return jax.nn.log_softmax(self.model_def.bind(params).logits(hidden[rows]), axis=-1)


def _finite_rows(hidden: jax.Array, batch: StepBatch) -> jax.Array:
    """[R] bool: whether hidden [T, M] is finite at every token of a row. Later tokens do not show what overflowed at earlier ones."""
    finite = jnp.all(jnp.isfinite(hidden), axis=-1)
    return jnp.ones(batch.slots.shape, jnp.bool_).at[batch.token_rows].min(finite, mode="drop")


class AdmittedRows(NamedTuple):
    """New values of some slots; unused rows carry the sink slot. See `SlotState` for the fields."""

    slots: jax.Array
    floats: jax.Array
    ints: jax.Array
    bias_ids: jax.Array
    bias_values: jax.Array
    bias_until: jax.Array
    masked: jax.Array
    mask: jax.Array


def admit(state: SlotState, rows: AdmittedRows) -> SlotState:
    """Write the sampling parameters of newly admitted requests into their slots."""
    values = rows._asdict()
    slots = values.pop("slots")
    return replace(state, **{name: getattr(state, name).at[slots].set(value) for name, value in values.items()})


def count_history(state: SlotState, slot: jax.Array, tokens: jax.Array, prompt_len: jax.Array, total: jax.Array) -> SlotState:
    """Set what penalties need to know of a slot: ids in the prompt, and how often each id was generated.

    tokens: [L] int32, prompt and outputs so far, of which `total` are real.
    """
    vocab_size = state.output_counts.shape[1]
    index = jnp.arange(tokens.shape[0])
    in_prompt, in_output = index < prompt_len, (index >= prompt_len) & (index < total)
    seen = jnp.zeros(state.prompt_ids.shape[1] * 32, jnp.bool_).at[jnp.where(in_prompt, tokens, vocab_size)].set(True, mode="drop")
    words = jnp.sum(seen.reshape(-1, 32).astype(jnp.uint32) << jnp.arange(32, dtype=jnp.uint32), axis=1, dtype=jnp.uint32)
    counts = jnp.zeros(vocab_size, jnp.int16).at[jnp.where(in_output, tokens, vocab_size)].add(1, mode="drop")
    return replace(state, prompt_ids=state.prompt_ids.at[slot].set(words), output_counts=state.output_counts.at[slot].set(counts))
