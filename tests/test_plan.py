"""The arithmetic of `jaxllm plan`, against calculations by hand."""

from __future__ import annotations

import json

import jax
import pytest

from jaxllm.config import EngineConfig
from jaxllm.errors import ModelLoadError
from jaxllm.plan import answer, make_plan
from tests.checkpoints import tiny_config

GIB = 2**30


def plan(hf_config, target, *, context_len=None, shards=1, **options):
    config = EngineConfig.from_options(tensor_parallel_size=shards, **options)
    request = {"target": target, "config": config.to_json(), "kind": "hf", "name": "m", "hf_config": hf_config, "context_len": context_len}
    return make_plan(request)


def real(conformance_data, name):
    return json.loads((conformance_data / "hf_configs" / f"{name}.json").read_text())


def test_llama_70b_on_sixteen_v5e_chips(conformance_data):
    found = plan(real(conformance_data, "meta-llama--Meta-Llama-3.1-70B"), "v5e:4x4", shards=16, max_model_len=8192, max_num_seqs=64)

    # 64 query heads in sixteen parts, and 8 KV heads each of which two chips hold; norms are everywhere.
    attention = 4 * 128 * 8192 + 2 * 128 * 8192 + 8192 * 4 * 128
    mlp = 3 * 8192 * 28672 // 16
    embeddings = 2 * 128256 // 16 * 8192
    weights = 2 * (80 * (attention + mlp + 2 * 8192) + embeddings + 8192)
    assert found["memory"]["weights"] == weights
    assert 8.3 * GIB < weights < 8.5 * GIB
    assert found["memory"]["usable"] == int(0.92 * 16 * GIB)
    # A key and a value of one head of 128 in each of 80 layers, two bytes an element.
    assert found["kv_bytes_per_token"] == 80 * 2 * 128 * 2
    left = found["memory"]["usable"] - weights - found["memory"]["sampling_state"] - found["memory"]["temporaries"]
    assert found["kv_tokens"] == (left // (40960 * 128) - 1) * 128
    assert found["requests"]["8192"] == found["kv_tokens"] / 8192
    # One request: every weight but the embedding's rows once, at 800 GB/s.
    one = found["decode"][0]
    assert one["batch"] == 1
    assert one["bound"] == "memory"
    read = weights - embeddings + 2048 * 40960
    assert one["seconds"] * 0.8e12 == pytest.approx(read, rel=1e-3)
    assert one["flops"] == pytest.approx(2 * (80 * (attention + mlp) + embeddings / 2) + 80 * 4 * 4 * 128 * 2048)


def test_llama_70b_does_not_fit_four_chips_and_what_would_is_named(conformance_data):
    found = plan(real(conformance_data, "meta-llama--Meta-Llama-3.1-70B"), "v6e:2x2", shards=4, max_num_seqs=64)
    assert not found["fits"]
    assert "leave 0 B of 29.44 GiB" in found["reason"]
    assert "h100:2" in found["would_fit"]
    assert "v6e:2x4" in found["would_fit"]


def test_qwen3_30b_a3b_on_four_v6e_chips(conformance_data):
    found = plan(real(conformance_data, "Qwen--Qwen3-30B-A3B"), "v6e:2x2", shards=4, max_model_len=8192, max_num_seqs=64)

    # A quarter of 32 query and 4 KV heads, and a quarter of each of 128 experts of width 768; routers and norms are everywhere.
    attention = (8 + 1 + 1 + 8) * 128 * 2048
    expert = 3 * 2048 * 768 // 4
    router = 128 * 2048
    norms = 2 * 2048 + 2 * 128
    embeddings = 2 * 151936 // 4 * 2048
    assert found["memory"]["weights"] == pytest.approx(2 * (48 * (attention + 128 * expert + router + norms) + embeddings + 2048), rel=2e-3)
    assert found["kv_bytes_per_token"] == 48 * 2 * 128 * 2
    # One token goes to eight experts of each layer.
    one = found["decode"][0]
    assert one["flops"] == pytest.approx(2 * (48 * (attention + 8 * expert + router) + embeddings / 2) + 48 * 4 * 8 * 128 * 2048, rel=1e-2)


def test_gpt_oss_20b_on_one_h100(conformance_data):
    found = plan(real(conformance_data, "openai--gpt-oss-20b"), "h100:1", max_model_len=8192, max_num_seqs=64)

    # The config names no dtype: bfloat16. 64 query and 8 KV heads of 64, 32 experts of width 2880.
    attention = (64 + 8 + 8 + 64) * 64 * 2880
    weights = 2 * (24 * (attention + 32 * 3 * 2880 * 2880) + 2 * 201088 * 2880)
    assert found["fits"]
    assert found["memory"]["weights"] == pytest.approx(weights, rel=2e-3)  # biases, routers, sinks and norms are the rest
    assert found["kv_bytes_per_token"] == 24 * 2 * 8 * 64 * 2


def test_deepseek_v3_does_not_fit_eight_h100(conformance_data):
    found = plan(real(conformance_data, "deepseek-ai--DeepSeek-V3"), "h100:8", shards=8, max_model_len=8192, max_num_seqs=64)
    assert not found["fits"]
    assert found["num_params"] == pytest.approx(671e9, rel=1e-3)
    # An eighth of 671 billion two-byte weights; latents are on all.
    assert found["memory"]["weights"] == pytest.approx(671e9 * 2 / 8, rel=2e-2)
    assert "b200:8" in found["would_fit"]


@pytest.mark.parametrize(("target", "attention", "lanes"), [("v6e:2x4", "tpu", 640), ("h200:8", "gpu", 576)])
def test_kimi_k2_in_part_keeps_one_latent_a_position(conformance_data, target, attention, lanes):
    """Its first layers; on TPUs a latent of 512 and a rotated key of 64 fill whole lanes."""
    config = real(conformance_data, "moonshotai--Kimi-K2-Instruct") | {"num_hidden_layers": 3}
    found = plan(config, target, shards=8, max_model_len=8192, max_num_seqs=64)
    assert found["attention"] == (attention if attention == "tpu" or jax.__version_info__ >= (0, 11) else "xla")
    assert found["kv_bytes_per_token"] == 3 * lanes * 2


def test_prefill_is_bound_by_compute(conformance_data):
    found = plan(real(conformance_data, "meta-llama--Meta-Llama-3.1-8B"), "h100:1", max_num_batched_tokens=2048)
    chunk = found["prefill"]
    layers = 32 * (4096 * 4096 * 2 + 2 * 1024 * 4096 + 3 * 4096 * 14336)
    causal = 2048 * 2049 / 2
    assert chunk["flops"] == pytest.approx(2 * 2048 * layers + 2 * 128256 * 4096 + 32 * 4 * 32 * 128 * causal)
    assert chunk["bound"] == "compute"
    assert chunk["seconds"] == pytest.approx(chunk["flops"] / 989.4e12)


def test_a_window_bounds_what_is_read():
    config = tiny_config("MistralForCausalLM", sliding_window=16)
    wide, narrow = (plan(tiny_config("MistralForCausalLM", sliding_window=w), "h100", context_len=200)["decode"][0] for w in (200, 16))
    per_position = plan(config, "h100")["kv_bytes_per_token"]
    assert wide["bytes"] - narrow["bytes"] == pytest.approx((200 - 16) * per_position)


def test_errors_come_back_as_data():
    request = {"target": "v6e", "config": EngineConfig().to_json(), "kind": "hf", "name": "m", "context_len": None}
    found = answer(request | {"hf_config": {"architectures": ["NoSuchModel"]}})
    assert found["error"] == "ModelLoadError"
    assert "NoSuchModel is not supported" in found["message"]
    with pytest.raises(ModelLoadError, match="NoSuchModel"):
        make_plan(request | {"hf_config": {"architectures": ["NoSuchModel"]}})
