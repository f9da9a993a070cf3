"""The default model through the whole engine against transformers: twenty real prompts of 11 to 1,500 tokens, all at once."""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxllm import LLM, SamplingParams

pytestmark = [pytest.mark.heavy, pytest.mark.default_model]

GOLDEN = Path(__file__).parents[1] / "golden" / "default_model.npz"
# Of any log-probability: what float32 sums in another order come to over 30 layers and 1,500 positions.
MAX_DELTA = 1e-3
# Best tokens of a step whose log-probabilities are stored.
NUM_TOP = 5


@pytest.fixture
def optimised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs as users have them: they compute for longer than they compile."""
    options = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
    if jax.__version_info__ < (0, 11):
        options["xla_cpu_use_fusion_emitters"] = True
    compile_well = functools.partialmethod(jax.stages.Lowered.compile, compiler_options=options)
    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_well)


def test_greedy_tokens_and_top_logprobs_equal_transformers(default_model_file: Path, optimised: None) -> None:
    with np.load(GOLDEN) as data:
        count = sum(name.startswith("prompt_") for name in data)
        prompts, tokens, ids, logprobs = ([data[f"{part}_{i}"] for i in range(count)] for part in ("prompt", "tokens", "ids", "logprobs"))
    params = [SamplingParams(temperature=0.0, max_tokens=len(one), ignore_eos=True, logprobs=NUM_TOP) for one in tokens]

    # Few programs, and only those that steps need.
    sizes = {"max_model_len": 2048, "max_num_seqs": 20, "max_num_batched_tokens": 512}
    with LLM(str(default_model_file), dtype="float32", enforce_eager=True, **sizes) as llm:
        outputs = llm.generate([one.tolist() for one in prompts], params, use_tqdm=False)

    assert count == 20
    completions = [output.outputs[0] for output in outputs]
    assert [completion.token_ids for completion in completions] == [one.tolist() for one in tokens]
    for number, completion in enumerate(completions):
        for step, found in enumerate(completion.logprobs):
            best = dict(zip(ids[number][step].tolist(), logprobs[number][step].tolist(), strict=True))
            # The fifth and the sixth may be as likely and change places.
            same = best.keys() & found.keys()
            assert len(same) >= NUM_TOP - 1
            assert all(abs(found[token].logprob - best[token]) < MAX_DELTA for token in same), (number, step)
            assert next(iter(found.values())).rank == 1
