"""Decoders that are pooled give the hidden states that they generate from: without pages, whole prompts, ragged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.config import CompileConfig
from jaxllm.errors import ModelLoadError
from jaxllm.models.build import define_model
from jaxllm.models.pooling import define_pooling
from jaxllm.pooling_params import PoolingParams
from jaxllm.runner.memory import Limits
from jaxllm.runner.mesh import Placement, make_mesh
from jaxllm.runner.pooling import PoolingRunner
from jaxllm.weights.hf import open_checkpoint
from jaxllm.weights.rules import load_params
from tests.golden.case import load_golden
from tests.golden.cases import CASES
from tests.runner.pooling import arrays, run

MAX_DELTA = 2e-4


@pytest.mark.parametrize("name", ["gemma2", "gemma4", "mixtral"])
def test_hidden_states_give_the_golden_logits(name: str, tmp_path: Path) -> None:
    case, golden = CASES[name], load_golden(name)
    directory = case.write(tmp_path)
    config, checkpoint = json.loads((directory / "config.json").read_text()), open_checkpoint(directory)
    pooled = define_pooling(config, dtype="float32")
    params = load_params(pooled, checkpoint, lambda name, array: jnp.asarray(array))
    prompt = golden.sequence.tolist()
    limits = Limits(4, len(prompt) + 5, 16)
    runner = PoolingRunner(pooled, params, limits, Placement(make_mesh(1)), CompileConfig(enforce_eager=True))

    _, hidden = arrays(run(runner, [prompt[:5], prompt], PoolingParams(task="token_embed", use_activation=False)))

    model = define_model(config, dtype="float32")
    decoder = model.bind(load_params(model, checkpoint, lambda name, array: jnp.asarray(array)))
    logits = np.asarray(decoder.logits(jnp.asarray(hidden[golden.positions])))
    assert np.abs(logits - golden.logits).max() < MAX_DELTA * max(1.0, np.abs(golden.logits).max())


def test_every_decoder_is_pooled_or_refused_by_name() -> None:
    found = {case.config["architectures"][0]: _task_of(case.config) for case in CASES.values()}
    assert {"embed", "refused"} == set(found.values())
    assert found["LlamaForCausalLM"] == found["Qwen3ForCausalLM"] == found["MistralForCausalLM"] == "embed"


def _task_of(config: dict[str, Any]) -> str:
    try:
        return define_pooling(config, dtype="float32").info.tasks[0]
    except ModelLoadError as error:
        return "refused" if "attention with ALiBi" in str(error) else str(error)
