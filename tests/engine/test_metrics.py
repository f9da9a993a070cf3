"""Metrics: names that dashboards know, and numbers that agree with what the engine did."""

from __future__ import annotations

import logging

import pytest
from prometheus_client import generate_latest

from jaxllm.core_types import EngineInfo, EngineOutput, EngineOutputs, ErrorKind, FinishReason, SchedulerStats
from jaxllm.engine.metrics import EngineMetrics
from tests.engine.harness import make_core, make_request
from tests.engine.mock_runner import cache_spec

INFO = EngineInfo(
    max_model_len=1000,
    vocab_size=50,
    page_size=8,
    num_pages=400,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    dtype="float32",
    platform="cpu",
)


def _metrics(**options: str) -> EngineMetrics:
    return EngineMetrics(INFO, model_name="m", **options)


def _values(metrics: EngineMetrics) -> dict:
    return {metric.name: metric.value for metric in metrics.snapshot()}


def test_counts_agree_with_what_was_served() -> None:
    core, metrics = make_core(cache_spec(8, 400)), _metrics()
    for i in range(4):
        request = make_request(str(i), list(range(20)), max_tokens=5)
        metrics.add_request(request)
        core.add_request(request)
    while core.has_work:
        metrics.update(core.step())
    found = _values(metrics)
    assert found["jaxllm:prompt_tokens"] == found["jaxllm:prefix_cache_queries"] == 80
    assert found["jaxllm:prompt_tokens_cached"] == found["jaxllm:prefix_cache_hits"] == 3 * 16
    assert found['jaxllm:prompt_tokens_by_source{source="local_compute"}'] == 32
    assert found["jaxllm:generation_tokens"] == 20
    assert found['jaxllm:request_success{finished_reason="length"}'] == 4
    assert found["jaxllm:num_requests_running"] == found["jaxllm:num_requests_waiting"] == found["jaxllm:kv_cache_usage_perc"] == 0
    assert found["jaxllm:time_to_first_token_seconds"]["_count"] == 4
    assert found["jaxllm:inter_token_latency_seconds"]["_count"] == 16
    assert found["jaxllm:request_generation_tokens"]["5.0"] == 4
    assert found["jaxllm:request_generation_tokens"]["2.0"] == 0
    assert found["jaxllm:scheduled_tokens"] == core.executor.num_tokens  # type: ignore[attr-defined]
    assert found["jaxllm:engine_steps"] == core.executor.num_steps  # type: ignore[attr-defined]
    assert found["jaxllm:host_seconds"] > 0


def test_times_of_a_request() -> None:
    metrics = _metrics()
    metrics.add_request(make_request("a", [1, 2], arrival_time=100.0))
    first = EngineOutput(request_id="a", new_token_ids=[5], num_cached_tokens=0, first_scheduled_time=101.0)
    last = EngineOutput(request_id="a", new_token_ids=[6], finish_reason=FinishReason.STOP, num_preemptions=2)
    metrics.update(EngineOutputs(outputs=[first]), now=103.0)
    metrics.update(EngineOutputs(outputs=[EngineOutput(request_id="a", new_token_ids=[5])]), now=104.0)
    metrics.update(EngineOutputs(outputs=[last]), now=107.0)
    found = {name.removeprefix("jaxllm:"): value for name, value in _values(metrics).items()}
    sums = {
        "time_to_first_token_seconds": 3,
        "inter_token_latency_seconds": 4,
        "request_time_per_output_token_seconds": 2,
        "e2e_request_latency_seconds": 7,
        "request_queue_time_seconds": 1,
        "request_prefill_time_seconds": 2,
        "request_decode_time_seconds": 4,
        "request_inference_time_seconds": 6,
        "request_num_preemptions": 2,
    }
    assert {name: found[name]["_sum"] for name in sums} == sums


def test_a_sequence_that_the_front_ends_is_counted_once_with_the_fronts_reason() -> None:
    metrics = _metrics()
    metrics.add_request(make_request("a", [1]))
    metrics.finish("a", "stop")
    metrics.update(EngineOutputs(outputs=[EngineOutput(request_id="a", finish_reason=FinishReason.ABORT)]))
    found = _values(metrics)
    assert found['jaxllm:request_success{finished_reason="stop"}'] == 1
    assert found['jaxllm:request_success{finished_reason="abort"}'] == 0
    assert not metrics._sequences


def test_a_refused_request_is_a_rejection_and_not_a_success() -> None:
    metrics = _metrics()
    metrics.add_request(make_request("a", [1]))
    refused = EngineOutput(request_id="a", finish_reason=FinishReason.ERROR, error="full", error_kind=ErrorKind.QUEUE_FULL)
    metrics.update(EngineOutputs(outputs=[refused]))
    found = _values(metrics)
    assert found['jaxllm:admission_rejections{reason="queue_full"}'] == 1
    assert found['jaxllm:request_success{finished_reason="error"}'] == 0


def test_dashboards_find_their_names_under_their_prefix() -> None:
    text = generate_latest(_metrics(prefix="vllm").registry).decode()
    for name in (
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total", "prefix_cache_hits_total"),
        *("num_preemptions_total", "prompt_tokens_total", "generation_tokens_total", "iteration_tokens_total_bucket"),
        *("time_to_first_token_seconds_bucket", "inter_token_latency_seconds_sum", "e2e_request_latency_seconds_count"),
        *("request_queue_time_seconds_bucket", "request_prompt_tokens_bucket", "request_params_n_bucket"),
    ):
        assert f'\nvllm:{name}{{engine="0"' in text, name
    assert 'vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 0.0' in text
    assert 'vllm:cache_config_info{block_size="8",engine="0",model_name="m",num_gpu_blocks="400"} 1.0' in text
    assert "jaxllm" not in text


def test_two_engines_do_not_share_a_registry() -> None:
    one, other = _metrics(), _metrics()
    one.update(EngineOutputs(stats=SchedulerStats(num_preemptions=3)))
    assert _values(one)["jaxllm:num_preemptions"] == 3
    assert _values(other)["jaxllm:num_preemptions"] == 0


def test_the_stats_line_tells_speed_load_and_hits() -> None:
    metrics = _metrics()
    metrics.add_request(make_request("a", [1] * 30))
    stats = SchedulerStats(num_running=3, num_waiting=2, kv_cache_usage=0.25, prefix_cache_queries=30, prefix_cache_hits=15)
    first = EngineOutput(request_id="a", new_token_ids=[5], num_cached_tokens=10)
    metrics.update(EngineOutputs(outputs=[first], stats=stats))
    assert metrics.stats_line(10.0) == (
        "Engine 000: Avg prompt throughput: 2.0 tokens/s, Avg generation throughput: 0.1 tokens/s, Running: 3 reqs, Waiting: 2 reqs, "
        "KV cache usage: 25.0%, Prefix cache hit rate: 50.0%"
    )


def test_an_idle_engine_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    metrics = _metrics()
    with caplog.at_level(logging.INFO, logger="jaxllm"):
        for _ in range(3):
            metrics.log_stats()
    assert len(caplog.records) == 1
