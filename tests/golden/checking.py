"""Comparing a model with what transformers gave."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.models.build import ModelDef, define_model
from jaxllm.weights.hf import open_checkpoint
from jaxllm.weights.rules import load_params
from tests.checkpoints import MemoryCheckpoint
from tests.dense import run_dense
from tests.golden.case import Case, Golden, load_golden

MAX_DELTA = 2e-4


def load(directory: Path, case: Case, tensor_parallel_size: int = 1) -> tuple[ModelDef, list[jax.Array]]:
    config = json.loads((directory / "config.json").read_text())
    model = define_model(config, dtype="float32", tensor_parallel_size=tensor_parallel_size, max_model_len=case.max_model_len)
    return model, load_params(model, open_checkpoint(directory), lambda name, array: jnp.asarray(array))


def check(case: Case, model: ModelDef, params: list[jax.Array]) -> None:
    golden = load_golden(case.name)
    check_logits(golden, run_dense(model, params, golden.sequence, golden.encoder))


def check_tensors(golden: Golden, config: dict[str, Any], tensors: Mapping[str, np.ndarray]) -> None:
    """Check a checkpoint of these tensors under this config."""
    model = define_model(config, dtype="float32")
    params = load_params(model, MemoryCheckpoint(tensors), lambda name, array: jnp.asarray(array))
    check_logits(golden, run_dense(model, params, golden.sequence, golden.encoder))


def check_logits(golden: Golden, logits: jax.Array) -> None:
    """logits [T, V] of the whole golden sequence."""
    logprobs = np.asarray(jax.nn.log_softmax(logits))
    expected = np.asarray(jax.nn.log_softmax(golden.logits))
    assert np.abs(logprobs[golden.positions] - expected).max() < MAX_DELTA
    steps = logprobs[len(golden.sequence) - len(golden.tokens) :] if len(golden.tokens) else logprobs[:0]
    assert steps.argmax(-1).tolist() == golden.tokens.tolist()
    assert np.abs(np.take_along_axis(steps, golden.top_ids, -1) - golden.top_logprobs).max(initial=0) < MAX_DELTA
