"""The default model through the whole batch API against transformers, on twenty real prompts of 7 to 1,500 tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jaxllm import LLM, SamplingParams

NUM_PROMPTS = 20
# Of log-probabilities, after 30 layers in float32 and up to 1,500 positions.
MAX_DELTA = 2e-3


@pytest.mark.heavy
@pytest.mark.default_model
def test_greedy_tokens_and_top_logprobs_equal_transformers(default_model_file: Path) -> None:
    with np.load(Path(__file__).parent / "default_model.npz") as data:
        golden = [{key: data[f"{key}_{i}"] for key in ("prompt", "tokens", "top_ids", "top_logprobs")} for i in range(NUM_PROMPTS)]
    with LLM(model=str(default_model_file), dtype="float32", max_model_len=2048) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": one["prompt"].tolist()} for one in golden],
            [SamplingParams(temperature=0, max_tokens=len(one["tokens"]), logprobs=5, ignore_eos=True) for one in golden],
            use_tqdm=False,
        )
    worst = 0.0
    for one, output in zip(golden, outputs, strict=True):
        (completion,) = output.outputs
        assert completion.token_ids == one["tokens"].tolist()
        for step, ids, logprobs in zip(completion.logprobs, one["top_ids"], one["top_logprobs"], strict=True):
            found = [step[int(i)].logprob if int(i) in step else np.nan for i in ids]
            # The fifth may change places with the sixth.
            assert sum(map(np.isnan, found)) <= 1
            worst = max(worst, float(np.nanmax(np.abs(np.array(found) - logprobs))))
    assert worst < MAX_DELTA
