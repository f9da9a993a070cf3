"""The memory plan, against arithmetic by hand."""

import numpy as np
import pytest

from jaxllm.config import CacheConfig
from jaxllm.core_types import CacheKind
from jaxllm.errors import OutOfMemoryPlanError
from jaxllm.models.build import define_model
from jaxllm.ops.attention import choose_backend
from jaxllm.runner import memory
from jaxllm.runner.memory import Limits, plan_memory, state_interval
from jaxllm.runner.mesh import Placement, make_mesh
from tests.checkpoints import tiny_config
from tests.golden.cases import CASES

LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=32, page_size=8)
# Two layers, keys and values, two heads of 8, 8 positions, float32.
PAGE = 2 * 2 * 2 * 8 * 8 * 4


def plan(config=None, *, limits=LIMITS, max_model_len=None, shards=1, **cache):
    model_def = define_model(config or tiny_config(), dtype="float32", tensor_parallel_size=shards)
    placement = Placement(make_mesh(shards))
    return model_def, plan_memory(model_def, choose_backend("cpu"), placement, CacheConfig(**cache), limits, max_model_len=max_model_len)


def test_weights_and_pages_are_counted():
    model_def, result = plan(kv_cache_memory_bytes=PAGE * 50)
    assert result.weights == model_def.num_params * 4
    assert result.kv_cache == PAGE * 50
    (group,) = result.cache_spec.groups
    assert (group.kind, group.layers, group.num_pages) == (CacheKind.FULL, (0, 1), 50)
    assert result.cache_tokens == 49 * 8
    assert result.max_model_len == 256
    for word in ("weights", "KV pages (392 tokens)", "usable per device"):
        assert word in result.table()


def test_no_more_pages_than_all_requests_together_can_use():
    _, result = plan(kv_cache_memory_bytes=2**30, max_model_len=64)
    assert result.cache_spec.groups[0].num_pages == 1 + 4 * 64 // 8


def test_the_context_shrinks_to_what_fits_unless_it_was_asked_for():
    _, result = plan(kv_cache_memory_bytes=PAGE * 10)
    assert result.max_model_len == 72
    with pytest.raises(OutOfMemoryPlanError, match=r"max_model_len=128 .* max_model_len=72 fits") as error:
        plan(kv_cache_memory_bytes=PAGE * 10, max_model_len=128)
    bytes_needed = int(str(error.value).rsplit("kv_cache_memory_bytes=", 1)[1])
    assert plan(kv_cache_memory_bytes=bytes_needed, max_model_len=128)[1].max_model_len == 128


def test_a_window_keeps_no_more_than_itself_and_a_chunk():
    config = tiny_config("MistralForCausalLM", sliding_window=16)
    _, result = plan(config, kv_cache_memory_bytes=2**30)
    (group,) = result.cache_spec.groups
    assert group.window == 16
    assert group.num_pages == 1 + 4 * ((16 + 32) // 8 + 2)
    assert result.max_model_len == 256


def test_shards_split_weights_and_pages():
    config = tiny_config(num_attention_heads=4, num_key_value_heads=2)
    _, one = plan(config, kv_cache_memory_bytes=PAGE * 50)
    _, two = plan(config, kv_cache_memory_bytes=PAGE * 50, shards=2)
    assert two.cache_spec.groups[0].num_pages == 100
    assert one.weights / 2 < two.weights < one.weights * 0.6


def test_a_plan_that_cannot_fit_says_what_to_turn(monkeypatch):
    monkeypatch.setattr(memory, "usable_memory", lambda placement, cache: 2**16)
    with pytest.raises(OutOfMemoryPlanError, match=r"gpu_memory_utilization .* max_num_seqs \(now 4\)"):
        plan()


@pytest.mark.parametrize("size", [1, 2**60])
def test_a_cache_size_that_cannot_be_is_refused_by_its_name(size):
    with pytest.raises(OutOfMemoryPlanError, match=rf"kv_cache_memory_bytes={size} must be from \d+ \(one page\) to \d+"):
        plan(kv_cache_memory_bytes=size)


def test_the_share_of_memory_is_honoured(monkeypatch):
    class Memory:
        available = 10 * 2**30

    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: Memory)
    assert plan(gpu_memory_utilization=0.5)[1].total == 5 * 2**30


@pytest.mark.parametrize(("platform", "usable"), [("tpu", 500), ("gpu", 1000)])
def test_of_what_a_device_reports_the_share_is_taken_unless_jax_took_it_already(platform, usable):
    class FakeDevice:
        memory_stats = staticmethod(lambda: {"bytes_limit": 1000})

    class FakeMesh:
        devices = np.array([FakeDevice()])

    FakeDevice.platform = platform
    assert memory.usable_memory(Placement(FakeMesh), CacheConfig(gpu_memory_utilization=0.5)) == usable


def test_states_have_a_pool_of_their_own_whose_pages_are_snapshots():
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=64, page_size=16)
    _, result = plan(CASES["qwen3_5"].config, limits=limits, kv_cache_memory_bytes=2**19)
    full, states = sorted(result.cache_spec.groups, key=lambda group: group.kind)
    assert (full.kind, full.layers, full.interval) == (CacheKind.FULL, (1,), None)
    assert (states.kind, states.layers, states.interval) == (CacheKind.RECURRENT, (0, 2, 3), 64)
    # Three layers, each a window of 3 inputs and the state, in float32; one layer of keys and values.
    state_page, page = 3 * 4 * (2 * (2 * 8 + 2 * 16) * 3 + 2 * 2 * 8 * 16), 16 * 2 * 2 * 16 * 4
    assert result.kv_cache == states.num_pages * state_page + full.num_pages * page
    # A snapshot an interval of what the full group holds, or two for each request of full length.
    tokens = (full.num_pages - 1) * 16
    assert states.num_pages - 1 == max(-(-tokens // 64), 2 * -(-tokens // 256))


@pytest.mark.parametrize(("name", "interval"), [("lfm2", 16), ("qwen3_5", 80), ("mamba2", 1024)])
def test_snapshots_lie_as_far_apart_as_a_state_takes_the_memory_of_positions(name: str, interval: int) -> None:
    """lfm2: three windows of 2 inputs of 32, 768 bytes, where a position takes 64. qwen3_5: 9600 against 128. mamba2: no positions."""
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=4096, page_size=16)
    assert state_interval(define_model(CASES[name].config, dtype="float32").cache_layers, limits) == interval


@pytest.mark.parametrize("shards", [1, 2])
def test_a_latent_is_kept_once_and_whole_on_every_device(shards):
    case = CASES["deepseek_v3"]
    _, result = plan(case.config, shards=shards, kv_cache_memory_bytes=2**20, max_model_len=64)
    # Three layers, a latent of 16 and a rotated key of 4, 8 positions, float32.
    assert result.kv_cache == result.cache_spec.groups[0].num_pages * 3 * (16 + 4) * 8 * 4


def test_experts_need_room_for_a_row_of_each_token_s_choice():
    small, large = (plan(CASES["mixtral"].config | {"num_experts_per_tok": k})[1].temporaries for k in (1, 4))
    assert large > 2 * small
