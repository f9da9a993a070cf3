"""Every pooling architecture against transformers, in float32, on tiny random checkpoints: prompts of 1, 9 and 150 tokens in one step."""

from __future__ import annotations

import numpy as np
import pytest

from jaxllm.pooling_params import PoolingParams
from tests.golden.pooling_cases import CASES, PATH, kept
from tests.runner.pooling import arrays, make_runner, run

pytestmark = pytest.mark.usefixtures("compiled_quickly")

MAX_DELTA = 1e-4


@pytest.mark.parametrize(
    ("name", "shards"),
    [*((name, 1) for name in CASES), *((name, 2) for name in ("bert_cross_encoder", "modernbert", "llama_classify"))],
)
def test_answers_equal_transformers(name: str, shards: int) -> None:
    case = CASES[name]
    runner = make_runner(case.config, tensor_parallel_size=shards, bare=case.auto == "AutoModel", convert="auto")
    task = runner.model_def.info.tasks[-1 if case.per_token else 0]
    prompts = case.prompts()
    seconds = [len(prompt) // 2 for prompt in prompts] if case.pairs else None
    found = arrays(run(runner, prompts, PoolingParams(task=task, use_activation=False), seconds))

    with np.load(PATH) as golden:
        for i, (prompt, answer) in enumerate(zip(prompts, found, strict=True)):
            answer = answer[kept(len(prompt))] if case.per_token else answer
            assert answer.shape == golden[f"{name}.{i}"].shape
            assert np.abs(answer - golden[f"{name}.{i}"]).max() < MAX_DELTA, i
    assert runner.guard.unexpected == 0
