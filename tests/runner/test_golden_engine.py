"""The whole engine against transformers: chunked prompts, 32 decode steps through paged caches, in float32."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from tests.golden.case import load_golden
from tests.golden.cases import CASES
from tests.runner.harness import Engine, greedy

MAX_DELTA = 2e-4

# The mathematics of every case is compared in tests/golden; here one case for each way of keeping and reading the cache.
ENGINE_CASES = [
    "llama",
    "mistral",
    "mistral_window",
    "qwen2",
    "qwen3",
    "qwen3_types_mixed",
    "gemma3",
    "gpt2",
    "gpt_oss",
    "deepseek_v3",
    "llama4",
    "mamba",
    "qwen3_5",
    "falcon_h1",
    "gemma2",
    "gemma4",
    "bloom",
    "ministral3",
]


@pytest.mark.heavy
@pytest.mark.parametrize("name", ENGINE_CASES)
def test_tokens_and_logprobs_equal_transformers(name: str, tmp_path: Path) -> None:
    case, golden = CASES[name], load_golden(name)
    engine = Engine(case.write(tmp_path), max_model_len=case.max_model_len, max_num_batched_tokens=24, max_num_seqs=4)
    params = greedy(len(golden.tokens), logprobs=5, prompt_logprobs=0)
    (result,) = engine.generate([golden.prompt], params)

    assert result.tokens == golden.tokens.tolist()
    for step, want_ids, want in zip(result.logprobs, golden.top_ids, golden.top_logprobs, strict=True):
        got = dict(zip(step.token_ids, step.logprobs, strict=True))
        assert {int(i) for i in want_ids} <= set(got)
        assert max(abs(got[int(i)] - p) for i, p in zip(want_ids, want, strict=True)) < MAX_DELTA
        assert step.rank == 1

    expected = np.asarray(jax.nn.log_softmax(golden.logits))
    checked = 0
    for position, row in zip(golden.positions, expected, strict=True):
        if position + 1 < len(golden.prompt):
            scored = result.prompt_logprobs[position]
            assert scored.token_ids[0] == golden.prompt[position + 1]
            assert abs(scored.logprobs[0] - row[scored.token_ids[0]]) < MAX_DELTA
            checked += 1
    assert len(result.prompt_logprobs) == len(golden.prompt) - 1
    assert checked


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3"])
def test_devices_that_share_experts_sinks_or_heads_of_a_latent_give_the_same_tokens(name: str, tmp_path: Path) -> None:
    case, golden = CASES[name], load_golden(name)
    engine = Engine(case.write(tmp_path), max_num_batched_tokens=24, max_num_seqs=4, tensor_parallel_size=2)
    (result,) = engine.generate([golden.prompt], greedy(len(golden.tokens)))
    assert result.tokens == golden.tokens.tolist()
