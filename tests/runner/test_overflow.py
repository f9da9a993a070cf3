"""Activations that pass float16's range end the request that met them, with a reason, and nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jaxllm.runner.model_runner import NOT_FINITE
from tests.checkpoints import random_tensors, tiny_config, write_model
from tests.runner.harness import Engine, Generated, greedy

pytestmark = pytest.mark.heavy

# The only token with a share in dimension 0 of the residual, which nothing else writes to.
HOT = 100
WHERE = ["gate_up", "k", "v", "logits"]
NEIGHBOURS = [list(range(3, 3 + length)) for length in (1, 5, 30, 90)]


def write_overflowing(directory: Path, where: str) -> Path:
    """A Llama whose layers overflow float16 (and not float32) at HOT, and nowhere else."""
    config = tiny_config()
    tensors = random_tensors(config, seed=4)
    embedding = tensors["model.embed_tokens.weight"]
    embedding[:, 0] = 0
    embedding[HOT, 0] = 1000
    for name, tensor in tensors.items():
        if "o_proj" in name or "down_proj" in name:
            tensor[0] = 0
        if "layernorm" in name:
            tensor[0] = 1
    layer = "model.layers.1"
    hot = {"gate_up": ["mlp.gate_proj", "mlp.up_proj"], "k": ["self_attn.k_proj"], "v": ["self_attn.v_proj"], "logits": []}[where]
    for name in hot:
        tensors[f"{layer}.{name}.weight"][:, 0] = 500 if where == "gate_up" else 30_000
    if where == "logits":
        tensors["model.norm.weight"][0] = 60_000
    return write_model(directory, config, tensors=tensors)


@pytest.fixture(scope="module", params=WHERE)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_overflowing(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def engine(directory: Path) -> Engine:
    return Engine(directory, dtype="float16", num_pages=40, max_num_seqs=6, max_num_batched_tokens=64)


@pytest.fixture(scope="module")
def clean(engine: Engine) -> list[list[int]]:
    """What the neighbours say in an engine that met no overflow."""
    results = engine.generate(NEIGHBOURS, params())
    assert all(result.error is None for result in results)
    return [result.tokens for result in results]


def params(**fields):
    # Without HOT, so that neighbours stay what they are.
    return greedy(12, **{"bad_words_token_ids": [[HOT]], **fields})


def assert_failed(result: Generated) -> None:
    assert (result.error, result.finish_reason) == (NOT_FINITE, "error")


@pytest.mark.parametrize(
    "prompt",
    [[7, 8, 9, HOT], [7, HOT, 8, 9], [HOT, *[7] * 20], [7] * 20 + [HOT] + [8] * 120, [7] * 130 + [HOT] + [8] * 3],
    ids=["last", "middle", "first", "early chunk", "late chunk"],
)
def test_an_overflow_in_a_prompt_ends_its_request_only(engine: Engine, clean: list[list[int]], prompt: list[int]) -> None:
    engine.core.reset_prefix_cache()
    requests = [*NEIGHBOURS[:2], prompt, *NEIGHBOURS[2:], prompt]

    results = engine.generate(requests, params(prompt_logprobs=1))

    assert_failed(results[2])
    assert_failed(results[5])
    assert results[2].tokens == []
    assert results[2].prompt_logprobs is None
    assert [results[i].tokens for i in (0, 1, 3, 4)] == clean
    # The pages that the failed requests had are in use again: nothing of them is seen.
    assert [result.tokens for result in engine.generate(NEIGHBOURS * 3, params())] == clean * 3
    assert_failed(engine.generate([prompt], params())[0])


def test_an_overflow_while_generating_ends_its_request_with_the_tokens_before_it(engine: Engine, clean: list[list[int]]) -> None:
    # HOT comes as the first token, and is fed to the model for the second.
    results = engine.generate([*NEIGHBOURS, [7, 8]], [*[params()] * 4, greedy(12, logit_bias={HOT: 1e9}, logprobs=2)])

    assert [result.tokens for result in results[:4]] == clean
    assert_failed(results[4])
    assert results[4].tokens == [HOT]
    assert len(results[4].logprobs) == 1


def test_an_overflow_on_one_shard_is_seen_on_all(directory: Path) -> None:
    engine = Engine(directory, dtype="float16", tensor_parallel_size=2)
    results = engine.generate([[7, HOT, 8, 9], [7, 8, 9]], params())
    assert_failed(results[0])
    assert (results[1].error, len(results[1].tokens)) == (None, 12)


@pytest.mark.parametrize(
    ("directory", "dtype"), [("gate_up", "float32"), ("k", "bfloat16"), ("v", "float32"), ("logits", "bfloat16")], indirect=["directory"]
)
def test_dtypes_of_a_larger_range_serve_the_same_prompts(directory: Path, dtype: str) -> None:
    engine = Engine(directory, dtype=dtype)
    (result,) = engine.generate([[7, HOT, 8, 9]], params(logprobs=1))
    assert (result.error, len(result.tokens)) == (None, 12)
    assert np.isfinite([value for entry in result.logprobs for value in entry.logprobs]).all()
