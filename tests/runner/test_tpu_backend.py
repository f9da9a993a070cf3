"""The engine on the TPU kernel (interpreted) gives the tokens and log-probabilities that it gives on XLA's attention."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.ops.attention import AttentionBackend, AttentionMetadata, choose_backend, tpu
from jaxllm.specs import AttendSpec
from pallas_kernels.devices import find_device
from tests.checkpoints import tiny_config, write_model
from tests.golden.case import load_golden
from tests.golden.cases import CASES
from tests.pallas.steps import make_step
from tests.runner import harness
from tests.runner.harness import Engine, greedy

pytestmark = pytest.mark.heavy

INTERPRETED = AttentionBackend("tpu", tpu.Attend(find_device("TPU v6 lite"), interpret=True), tpu.cache_shapes)


@pytest.mark.parametrize(
    ("architecture", "changes", "shards"),
    [
        ("LlamaForCausalLM", {"num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 1}, 1),
        ("LlamaForCausalLM", {"num_attention_heads": 8, "num_key_value_heads": 2}, 2),
        ("MistralForCausalLM", {"sliding_window": 16, "num_hidden_layers": 1}, 1),
    ],
    ids=["llama", "llama on two devices", "mistral with a window"],
)
def test_the_tpu_kernel_serves_an_engine(architecture, changes, shards, tmp_path, monkeypatch):
    directory = write_model(tmp_path, tiny_config(architecture, **changes), seed=3)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(1, 127, n).tolist() for n in (1, 7, 8, 9, 40, 23)]
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "tensor_parallel_size": shards}

    found = []
    for backend in (choose_backend("cpu"), INTERPRETED):
        monkeypatch.setattr(harness, "choose_backend", lambda platform, backend=backend: backend)
        engine = Engine(directory, **options)
        found.append(engine.generate(prompts, greedy(8, logprobs=1)))
    for expected, result in zip(*found, strict=True):
        assert result.tokens == expected.tokens
        scores = [[step.logprobs[0] for step in one.logprobs] for one in (expected, result)]
        np.testing.assert_allclose(scores[1], scores[0], atol=1e-4)


def test_latents_give_the_golden_tokens(tmp_path, monkeypatch):
    case, golden = CASES["deepseek_v3"], load_golden("deepseek_v3")
    monkeypatch.setattr(harness, "choose_backend", lambda platform: INTERPRETED)
    engine = Engine(case.write(tmp_path), max_num_batched_tokens=24, max_num_seqs=4, tensor_parallel_size=2)
    (result,) = engine.generate([golden.prompt], greedy(len(golden.tokens)))
    assert result.tokens == golden.tokens.tolist()


def test_a_layer_reads_the_keys_and_values_of_another():
    step = make_step([(1, 11), (1, 3)], 2, 2, dtype="bfloat16")
    metadata = AttentionMetadata(step.page_table, step.q_starts, step.kv_lens, step.kv_lens - 1, jnp.arange(2), step.num_decodes)

    out, pages = INTERPRETED.attend_shard(step.q, step.k, step.v, step.cache, metadata, AttendSpec(0.1), None, None)
    again, same = INTERPRETED.attend_shard(step.q, None, None, pages, metadata, AttendSpec(0.1), None, None)
    np.testing.assert_array_equal(again, out)
    np.testing.assert_array_equal(same, pages)
