"""The device side of a pooling engine: whole prompts in, vectors out. Nothing is kept between steps."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import CompileConfig
from jaxllm.core_types import CacheSpec, NewRow, Pooled, RowResult, SchedulerOutput, StepResult
from jaxllm.layers.pooling import pool
from jaxllm.models.pooling import PoolingDef, PoolingModel
from jaxllm.ops.attention.segments import Segments, attend_segments
from jaxllm.ops.moe import sharded_experts
from jaxllm.pooling_params import PoolingParams
from jaxllm.runner.base import Runner
from jaxllm.runner.buckets import Bucket, pooling_ladder
from jaxllm.runner.compile import BucketPrograms, CompileGuard
from jaxllm.runner.memory import Limits
from jaxllm.runner.mesh import Placement

NOT_FINITE = "the model's hidden states are not finite: activations overflowed the dtype; start with --dtype bfloat16 or float32"


def packed_size(bucket: Bucket) -> int:
    """Numbers of a packed step."""
    return bucket.num_tokens + 2 * bucket.num_rows + 1


def pack(rows: Sequence[NewRow], bucket: Bucket) -> np.ndarray:
    """A step as one int32 array: tokens [T], first token of each row [R + 1], first token of each row's second text [R]."""
    packed = np.zeros(packed_size(bucket), np.int32)
    tokens, starts, seconds = np.split(packed, [bucket.num_tokens, bucket.num_tokens + bucket.num_rows + 1])
    end = 0
    for i, row in enumerate(rows):
        tokens[end : end + len(row.token_ids)] = row.token_ids
        seconds[i] = end + (len(row.token_ids) if row.second_start is None else row.second_start)
        end += len(row.token_ids)
        starts[i + 1] = end
    starts[len(rows) + 1 :] = end
    return packed


@dataclass(frozen=True, eq=False)
class PoolingProgram:
    """What is compiled, beside the bucket."""

    model_def: PoolingDef
    placement: Placement

    def step(self, params: Sequence[jax.Array], packed: jax.Array, *, bucket: Bucket) -> tuple[jax.Array, jax.Array, jax.Array]:
        """packed, see `pack`, to (answers [R, W] float32 before the last activation, finite [R] bool, hidden states [T, M])."""
        num_tokens, num_rows = bucket.num_tokens, bucket.num_rows
        tokens, starts, seconds = jnp.split(packed, [num_tokens, num_tokens + num_rows + 1])
        index, segments = jnp.arange(num_tokens), Segments.of(starts, num_tokens)
        rows = segments.rows
        model: PoolingModel = self.model_def.bind(params)

        attend = functools.partial(attend_segments, segments, self.placement.mesh, "model")
        caches = [None] * len(self.model_def.spec.blocks)
        token_types = (index >= seconds[jnp.minimum(rows, num_rows - 1)]).astype(jnp.int32)
        experts = sharded_experts(self.placement.mesh, experts_axis="expert", width_axis="model")
        hidden, _ = model.backbone(tokens, index - segments.firsts, caches, attend, token_types, experts=experts)
        finite = jax.ops.segment_min(jnp.all(jnp.isfinite(hidden), axis=-1).astype(jnp.int32), rows, num_rows + 1)[:num_rows] > 0
        answers = model.head(pool(hidden, starts, segments, self.model_def.pooling.kinds))
        return answers, finite & jnp.all(jnp.isfinite(answers), axis=-1), hidden

    def answers_of_tokens(self, params: Sequence[jax.Array], hidden: jax.Array) -> jax.Array:
        """Hidden states [T, M] to an answer for each token [T, W] float32, before the last activation."""
        return self.model_def.bind(params).head(hidden)


class PoolingRunner(Runner):
    """Implements `core_types.Executor` for a pooling model.

    Args:
        model_def: the model.
        params: its parameters, in the order of `model_def.names`.
        limits: rows and tokens of a step.
    """

    def __init__(
        self, model_def: PoolingDef, params: Sequence[jax.Array], limits: Limits, placement: Placement, compile_config: CompileConfig
    ):
        self.cache_spec = CacheSpec(limits.page_size, ())
        self.guard = CompileGuard()
        self.model_def = model_def
        self._params = list(params)
        self._placement = placement
        self._program = PoolingProgram(model_def, placement)
        buckets = pooling_ladder(limits.max_num_seqs, limits.max_num_batched_tokens)
        self._programs = BucketPrograms(buckets, self._compile, self.guard, lazy=compile_config.enforce_eager)
        self._ladders = (self._programs,)
        self._of_tokens = jax.jit(self._program.answers_of_tokens)

    def _compile(self, bucket: Bucket) -> Any:
        replicated = self._placement.sharding()
        params = [jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=p.sharding) for p in self._params]
        packed = jax.ShapeDtypeStruct((packed_size(bucket),), jnp.int32, sharding=replicated)
        step = jax.jit(functools.partial(self._program.step, bucket=bucket), out_shardings=replicated)
        return step.lower(params, packed).compile()

    def warm_up(self) -> int:
        """Compile what serving needs at least. Returns the bytes of temporaries that the largest step needs (0 where steps are compiled
        when they are needed).
        """
        return self._programs.compile_first()

    def execute(self, step: SchedulerOutput) -> _PendingStep:
        """Pack the batch and enqueue it. Returns before the device is done."""
        by_slot = {row.slot: row for row in step.new_rows}
        rows = [by_slot[row.slot] for row in step.rows]
        with self.guard.watching():
            bucket, program = self._programs.get(step.num_tokens, len(rows))
            answers, finite, hidden = program(self._params, pack(rows, bucket))
            per_token = None
            if any(_wants_tokens(row) for row in rows):
                per_token = hidden
                if self.model_def.pooling.dense:
                    with self.guard.expected():
                        per_token = self._of_tokens(self._params, hidden)
        return _PendingStep(self.model_def.pooling.activation, rows, bucket, answers, finite, per_token)


def _wants_tokens(row: NewRow) -> bool:
    return row.pooling_params is not None and (row.pooling_params.task or "").startswith("token_")


class _PendingStep:
    """A step on the device; `result` waits for it."""

    def __init__(
        self, activation: str, rows: list[NewRow], bucket: Bucket, answers: jax.Array, finite: jax.Array, per_token: jax.Array | None
    ):
        self._activation = activation
        self._rows = rows
        self._bucket = bucket
        self._answers, self._finite, self._per_token = answers, finite, per_token
        for array in (answers, finite) if per_token is None else (answers, finite, per_token):
            array.copy_to_host_async()

    def sample(self, masks: dict[int, np.ndarray]) -> None:
        """Nothing here has a token to wait for."""
        raise AssertionError("pooled requests sample nothing")

    def result(self) -> StepResult:
        answers, finite = np.asarray(self._answers), np.asarray(self._finite)
        per_token = None if self._per_token is None else np.asarray(self._per_token, np.float32)
        results, start = [], 0
        for i, row in enumerate(self._rows):
            end = start + len(row.token_ids)
            params = row.pooling_params
            assert params is not None
            if not finite[i]:
                results.append(RowResult(error=NOT_FINITE))
            else:
                raw = answers[i] if per_token is None or not _wants_tokens(row) else _chosen(per_token[start:end], row.token_ids, params)
                results.append(RowResult(pooled=Pooled.of(finished(raw, self._activation, params))))
            start = end
        return StepResult(results, self._bucket.num_tokens)


def _chosen(values: np.ndarray, token_ids: Sequence[int], params: PoolingParams) -> np.ndarray:
    """The columns and the rows [tokens, W] that the request asks for."""
    if params.returned_token_ids is not None:
        values = values[:, params.returned_token_ids]
    return values if params.step_tag_id is None else values[np.asarray(token_ids) == params.step_tag_id]


def finished(raw: np.ndarray, activation: str, params: PoolingParams) -> np.ndarray:
    """Answers [..., W] cut to the dimensions asked for, through the last activation unless the request turns it off."""
    if params.dimensions is not None:
        raw = raw[..., : params.dimensions]
    if params.use_activation is not None:
        activation = "identity" if not params.use_activation else "normalize" if "embed" in (params.task or "") else activation
    if activation == "normalize":
        return raw / np.maximum(np.linalg.norm(raw, axis=-1, keepdims=True), 1e-12)
    if activation == "softmax":
        powers = np.exp(raw - raw.max(-1, keepdims=True))
        return powers / powers.sum(-1, keepdims=True)
    if activation == "sigmoid":
        return 0.5 * (1 + np.tanh(0.5 * raw))
    return np.tanh(raw) if activation == "tanh" else raw
