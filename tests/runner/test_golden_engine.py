"""Every family through the whole engine against transformers, in float32: chunked prompts, and decoding from pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.runner import model_runner
from jaxllm.runner.aot import collectives
from jaxllm.runner.buckets import Bucket
from jaxllm.runner.sampler import SamplerOutput, top_logprobs_of
from tests.golden.case import Golden, load_golden
from tests.golden.cases import CASES, FAMILY_CASES
from tests.golden.checking import MAX_DELTA
from tests.runner.harness import Engine, Generated, greedy

# One case for each way of keeping and reading what is kept: these run in all shapes of steps, and score their prompts.
ENGINE_CASES = ["llama", "qwen3_types_mixed", "gpt2", "gpt_oss", "deepseek_v3", "llama4", "qwen3_5", "falcon_h1", "gemma4", "bloom"]


@pytest.fixture
def quick_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts and decodes in steps of one shape, which take the best token."""
    monkeypatch.setattr(model_runner, "bucket_ladder", lambda *limits: (Bucket(24, 2),))
    monkeypatch.setattr("jaxllm.runner.step.choose", choose_best)


def choose_best(raw: jax.Array, *rest: Any, max_logprobs: int, **options: Any) -> SamplerOutput:
    """What greedy rows without penalties get of the sampler."""
    tokens, true = jnp.argmax(raw, axis=-1).astype(jnp.int32), jnp.ones(len(raw), jnp.bool_)
    return SamplerOutput(tokens, true, true, *top_logprobs_of(raw, tokens, max_logprobs))


@pytest.mark.parametrize("name", FAMILY_CASES)
def test_two_devices_decode_from_pages_what_transformers_gives(name: str, tmp_path: Path, quick_steps: None) -> None:
    case, golden = CASES[name], load_golden(name)
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 24}
    engine = Engine(case.write(tmp_path), max_model_len=case.max_model_len, tensor_parallel_size=2, **limits)
    # Beside the prompt in chunks, another one that decodes already.
    result, _ = engine.generate([golden.prompt, golden.prompt[:5]], greedy(len(golden.tokens), logprobs=5))

    check_tokens(result, golden)
    (program,) = engine.runner._programs._ready.values()
    # Layers sum partial results, and never move weights or pages.
    assert {found.kind for found in collectives(program.as_text()) if found.in_layers} == {"all-reduce"}


@pytest.mark.heavy
@pytest.mark.parametrize("name", ENGINE_CASES)
def test_every_shape_of_step_gives_what_transformers_gives(name: str, tmp_path: Path) -> None:
    case, golden = CASES[name], load_golden(name)
    engine = Engine(case.write(tmp_path), max_model_len=case.max_model_len, max_num_batched_tokens=24, max_num_seqs=4)
    (result,) = engine.generate([golden.prompt], greedy(len(golden.tokens), logprobs=5, prompt_logprobs=0))

    check_tokens(result, golden)
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


def check_tokens(result: Generated, golden: Golden) -> None:
    """Check the greedy tokens, and the log-probabilities of the best five at each step."""
    assert len(golden.tokens) >= 24
    assert result.tokens == golden.tokens.tolist()
    for step, want_ids, want in zip(result.logprobs, golden.top_ids, golden.top_logprobs, strict=True):
        got = dict(zip(step.token_ids, step.logprobs, strict=True))
        assert {int(i) for i in want_ids} <= set(got)
        assert max(abs(got[int(i)] - p) for i, p in zip(want_ids, want, strict=True)) < MAX_DELTA
        assert step.rank == 1
