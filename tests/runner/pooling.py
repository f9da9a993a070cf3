"""A pooling runner over made-up tensors, without an engine: prompts in, answers out, all in one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxllm.config import CompileConfig
from jaxllm.core_types import NewRow, RowResult, ScheduledRow, SchedulerOutput
from jaxllm.models.pooling import PoolingDef, define_pooling
from jaxllm.pooling_params import PoolingParams
from jaxllm.runner.memory import Limits
from jaxllm.runner.mesh import Placement, make_mesh
from jaxllm.runner.pooling import PoolingRunner
from jaxllm.sampling_params import SamplingParams
from jaxllm.weights.rules import load_params
from tests.checkpoints import MemoryCheckpoint
from tests.golden.pooling_cases import PATH, PoolingCase, kept, random_tensor


def random_checkpoint(model: PoolingDef, *, bare: bool = False) -> MemoryCheckpoint:
    """Every tensor that the model loads, by the names that a checkpoint of the whole model or of the `bare` backbone has."""
    tensors = {}
    for recipes in model.rules.recipes.values():
        for full, shape in recipes[0].tensors():
            name = full.removeprefix(model.rules.prefix) if bare else full
            tensors[name] = random_tensor(name, shape)
    return MemoryCheckpoint(tensors)


def make_runner(
    config: dict[str, Any], *, tensor_parallel_size: int = 1, bare: bool = False, max_num_batched_tokens: int = 160, **options: Any
) -> PoolingRunner:
    """A runner that compiles what it needs when it needs it; options are those of `define_pooling`."""
    model = define_pooling(config, dtype="float32", tensor_parallel_size=tensor_parallel_size, **options)
    placement = Placement(make_mesh(tensor_parallel_size))
    params = load_params(model, random_checkpoint(model, bare=bare), lambda name, array: placement.put(array, model.axes[name]))
    return PoolingRunner(model, params, Limits(8, max_num_batched_tokens, 16), placement, CompileConfig(enforce_eager=True))


def run(
    runner: PoolingRunner, prompts: Sequence[Sequence[int]], params: PoolingParams, second_starts: Sequence[int] | None = None
) -> list[RowResult]:
    """The results of one step with all prompts."""
    new = [
        NewRow(slot, str(slot), len(prompt), list(map(int, prompt)), SamplingParams(max_tokens=1), 0, [], params, second)
        for slot, (prompt, second) in enumerate(zip(prompts, second_starts or [None] * len(prompts), strict=True))
    ]
    rows = [ScheduledRow(row.slot, 0, row.prompt_len, True, []) for row in new]
    return runner.execute(SchedulerOutput(1, rows, new)).result().rows


def arrays(results: Sequence[RowResult]) -> list[np.ndarray]:
    assert all(result.pooled is not None for result in results), results
    return [result.pooled.array for result in results if result.pooled is not None]


def largest_error(case: PoolingCase, shards: int = 1) -> float:
    """The largest difference of an answer to a prompt of the case from transformers'; all prompts are in one step."""
    runner = make_runner(case.config, tensor_parallel_size=shards, bare=case.auto == "AutoModel", token_ids=case.token_ids)
    task = runner.model_def.info.tasks[-1 if case.per_token else 0]
    prompts = case.prompts()
    seconds = [len(prompt) // 2 for prompt in prompts] if case.pairs else None
    found = arrays(run(runner, prompts, PoolingParams(task=task, use_activation=False), seconds))
    assert runner.guard.unexpected == 0
    errors = []
    with np.load(PATH) as golden:
        for i, (prompt, answer) in enumerate(zip(prompts, found, strict=True)):
            answer = answer[kept(len(prompt))] if case.per_token else answer
            assert answer.shape == golden[f"{case.name}.{i}"].shape
            errors.append(float(np.abs(answer - golden[f"{case.name}.{i}"]).max()))
    return max(errors)
