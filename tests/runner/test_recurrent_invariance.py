"""Greedy tokens of a model with states in pages do not depend on how the engine happens to compute them."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxllm.core_types import CacheKind
from tests.checkpoints import write_model
from tests.golden.cases import CASES
from tests.runner.harness import Engine, greedy
from tests.runner.test_invariance import make_prompts

pytestmark = pytest.mark.heavy

MAX_TOKENS = 20
PROMPTS = [prompt[:100] for prompt in make_prompts(10, seed=5)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """A gated delta net and gated attention: the first two layers of a golden case."""
    case = CASES["qwen3_5"]
    config = case.config | {"num_hidden_layers": 2, "layer_types": case.config["layer_types"][:2]}
    tensors = {name: tensor for name, tensor in case.tensors().items() if ".layers.2." not in name and ".layers.3." not in name}
    return write_model(tmp_path_factory.mktemp("hybrid"), config, tensors=tensors)


@pytest.fixture(scope="module")
def alone(directory) -> list[list[int]]:
    """Each prompt by itself, whole prompts in one chunk, nothing cached, plain loop."""
    engine = Engine(directory, max_num_seqs=1, max_num_batched_tokens=128, async_scheduling=False, enable_prefix_caching=False)
    return [engine.generate([prompt], greedy(MAX_TOKENS))[0].tokens for prompt in PROMPTS]


def test_prefixes_are_found_up_to_the_last_snapshot(directory, alone):
    engine = Engine(directory, max_num_seqs=8, max_num_batched_tokens=16)
    assert [result.tokens for result in engine.generate(PROMPTS, greedy(MAX_TOKENS))] == alone
    again = engine.generate(PROMPTS, greedy(MAX_TOKENS))
    assert [result.tokens for result in again] == alone
    # There is one every 16 positions, the most that a step computes.
    assert [result.num_cached_tokens for result in again] == [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS]


def test_forced_preemption(directory, alone):
    """30 pages for 240 positions, and 4 for the states of two rows and the snapshots they start from."""
    engine = Engine(directory, max_num_seqs=8, max_num_batched_tokens=64, num_pages={CacheKind.FULL: 31, CacheKind.RECURRENT: 5})
    results = engine.generate(PROMPTS, greedy(MAX_TOKENS))
    assert [result.tokens for result in results] == alone
    assert sum(result.num_preemptions for result in results) > 0


def test_whole_prompts_over_two_devices(directory, alone):
    engine = Engine(directory, max_num_seqs=8, max_num_batched_tokens=512, tensor_parallel_size=2, enable_prefix_caching=False)
    assert [result.tokens for result in engine.generate(PROMPTS, greedy(MAX_TOKENS))] == alone
