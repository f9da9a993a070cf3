"""Greedy tokens of a request do not depend on how the engine happens to compute them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.checkpoints import tiny_config, write_model
from tests.runner.harness import Engine, greedy

pytestmark = pytest.mark.heavy

MAX_TOKENS = 24
CONFIGS = {
    "llama": tiny_config("LlamaForCausalLM", num_attention_heads=8, num_key_value_heads=2),
    # Two layers with windows and one without.
    "gemma3": tiny_config("Gemma3ForCausalLM", num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=1),
    "mistral_window": tiny_config("MistralForCausalLM", sliding_window=16),
}


@pytest.fixture(scope="module", params=CONFIGS)
def directory(request, tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp(request.param), CONFIGS[request.param], seed=3)


def make_prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Prompts of 1 to 150 tokens, most of them sharing a prefix with another one."""
    rng = np.random.default_rng(seed)
    base = rng.integers(1, 127, 120).tolist()
    return [base[: rng.integers(0, 120)] + rng.integers(1, 127, rng.integers(1, 30)).tolist() for _ in range(count)]


PROMPTS = make_prompts(32)


@pytest.fixture(scope="module")
def alone(directory) -> list[list[int]]:
    """Each prompt by itself, whole prompts in one chunk, nothing cached, plain loop."""
    engine = Engine(directory, max_num_seqs=1, max_num_batched_tokens=256, async_scheduling=False, enable_prefix_caching=False)
    return [engine.generate([prompt], greedy(MAX_TOKENS))[0].tokens for prompt in PROMPTS]


def tokens_of(engine: Engine, prompts=PROMPTS) -> list[list[int]]:
    return [result.tokens for result in engine.generate(prompts, greedy(MAX_TOKENS))]


@pytest.mark.parametrize(("chunk", "prefix"), [(16, True), (64, True), (64, False), (512, True)])
def test_chunks_batches_and_prefix_cache(directory, alone, chunk, prefix):
    engine = Engine(directory, max_num_seqs=32, max_num_batched_tokens=chunk, enable_prefix_caching=prefix)
    assert tokens_of(engine) == alone
    if prefix:
        again = engine.generate(PROMPTS, greedy(MAX_TOKENS))
        assert [result.tokens for result in again] == alone
        assert sum(result.num_cached_tokens for result in again) > 0


@pytest.mark.parametrize("overlapped", [True, False], ids=["overlapped", "plain"])
def test_forced_preemption(directory, alone, overlapped):
    engine = Engine(directory, max_num_seqs=8, max_num_batched_tokens=64, num_pages=30, async_scheduling=overlapped)
    results = engine.generate(PROMPTS, greedy(MAX_TOKENS))
    assert [result.tokens for result in results] == alone
    assert sum(result.num_preemptions for result in results) > 0


@pytest.mark.parametrize("shards", [2, 4])
def test_tensor_parallel(directory, alone, shards):
    engine = Engine(directory, max_num_seqs=8, max_num_batched_tokens=64, tensor_parallel_size=shards)
    prompts = PROMPTS[:12]
    assert tokens_of(engine, prompts) == alone[:12]


@pytest.mark.parametrize("directory", ["llama"], indirect=True)
def test_seeded_sampling_does_not_depend_on_batch_mates(directory):
    params = [greedy(12).clone(temperature=1.0, seed=i, top_p=0.9) for i in range(8)]
    together = Engine(directory, max_num_seqs=8).generate(PROMPTS[:8], params)
    single = Engine(directory, max_num_seqs=1, max_num_batched_tokens=16, async_scheduling=False)
    alone = [single.generate([prompt], p)[0].tokens for prompt, p in zip(PROMPTS[:8], params, strict=True)]
    assert [result.tokens for result in together] == alone


def test_no_program_is_compiled_after_warm_up(directory):
    engine = Engine(directory, max_num_seqs=8, max_num_batched_tokens=64, lazy=False)
    engine.runner.compile_in_background()
    engine.runner.wait_until_compiled()
    compiled = engine.runner.num_compilations
    mixed = [greedy(8), greedy(8).clone(temperature=0.8, top_k=5, repetition_penalty=1.2), greedy(8, logprobs=3, logit_bias={5: 2.0})]
    engine.generate(PROMPTS[:24], [mixed[i % 3] for i in range(24)])
    assert engine.runner.num_compilations == compiled
    assert engine.runner.guard.unexpected == 0
