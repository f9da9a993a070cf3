"""The benchmarks of an engine in this process, over the real scheduler and step loop and an executor without a model."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import pytest

from jaxllm import launch
from jaxllm.cli.bench import engine as bench_engine
from jaxllm.cli.bench.engine import BenchEngine
from jaxllm.cli.bench.workload import BenchRequest
from jaxllm.cli.main import main
from jaxllm.config import EngineConfig
from jaxllm.core_types import RowResult, StepResult
from jaxllm.errors import ConfigError, JaxllmError
from jaxllm.runner.roofline import Work
from tests.scripted_engine import ScriptedExecutor, scripted_engine


class Device:
    """What the runner has beside its steps: programs that compile, here one in each step from the `compiles_from`th on."""

    compiles_from = 10**9
    fails = False

    def __init__(self, executor: ScriptedExecutor):
        self._executor = executor
        self.cache_spec = executor.cache_spec
        self.num_compilations = 0
        self.waited = False

    @property
    def roofline(self) -> Any:
        return types.SimpleNamespace(generation=lambda sizes, steps, cached: Work(flops=10.0 * len(sizes), bytes=5.0 * steps))

    def wait_until_compiled(self) -> None:
        self.waited = True

    def execute(self, step: Any) -> Any:
        handle = self._executor.execute(step)
        self.num_compilations += self._executor.num_steps >= self.compiles_from
        result = handle.result()
        rows = [RowResult(error="the logits are not finite") for _ in result.rows] if self.fails else result.rows
        done = StepResult(rows, num_padded_tokens=2 * result.num_padded_tokens)
        handle.result = lambda: done
        return handle

    def shutdown(self) -> None:
        self._executor.shutdown()


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> type[Device]:
    """Engines without a model; the class's attributes say how they misbehave."""
    device = type("ThisDevice", (Device,), {})

    def start(config: EngineConfig) -> Any:
        core, info = scripted_engine(config, lambda prompt, index: 5)
        core.executor = device(core.executor)  # type: ignore[arg-type]
        return core, info

    monkeypatch.setattr(launch, "start_engine", start)
    return device


def test_a_run_counts_tokens_steps_and_padding():
    with BenchEngine(EngineConfig()) as engine:
        run = engine.run([BenchRequest([1] * 40, 3), BenchRequest([2] * 7, 5)])

    assert (run.num_prompt_tokens, run.num_output_tokens) == (47, 8)
    # The last token of each request is sampled and not computed.
    assert run.stats.num_scheduled_tokens == 47 + 8 - 2
    assert run.as_json()["padding_waste"] == pytest.approx(0.5)
    assert run.stats.num_steps >= 5
    assert len(run.first_token_seconds) == 2
    assert 0 < run.stats.host_seconds <= run.seconds


def test_runs_do_not_profit_from_what_earlier_ones_cached():
    requests = [BenchRequest(list(range(10, 110)), 2)]

    with BenchEngine(EngineConfig()) as engine:
        first, second = engine.run(requests), engine.run(requests)

    assert first.num_cached_tokens == second.num_cached_tokens == 0
    assert first.stats.num_scheduled_tokens == second.stats.num_scheduled_tokens


def test_prefixes_shared_inside_a_run_are_reported():
    prefix = list(range(10, 110))

    with BenchEngine(EngineConfig.from_options(max_num_seqs=1)) as engine:
        run = engine.run([BenchRequest([*prefix, 1], 2), BenchRequest([*prefix, 2], 2)])

    assert run.num_cached_tokens > 0


def test_compilations_during_a_run_are_counted(device: type[Device]):
    device.compiles_from = 4

    with BenchEngine(EngineConfig()) as engine:
        run = engine.run([BenchRequest([1], 6)])

    assert run.num_compilations > 0


def test_requests_that_cannot_fit_are_refused_before_they_run():
    with BenchEngine(EngineConfig()) as engine, pytest.raises(ConfigError, match="max_model_len=512"):
        engine.run([BenchRequest([1] * 510, 10)])


def test_a_failing_request_fails_the_benchmark(device: type[Device]):
    device.fails = True

    with BenchEngine(EngineConfig()) as engine, pytest.raises(JaxllmError, match="not finite"):
        engine.run([BenchRequest([1], 6)])


def fake_roofline(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"bytes_per_second": 1e12, "flops_per_second": {"float32": 1e12}}
    monkeypatch.setattr(bench_engine, "json_of", lambda *arguments, timeout_s: limits)


def test_throughput_prints_and_writes_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    fake_roofline(monkeypatch)
    path = tmp_path / "out.json"

    assert main(["bench", "throughput", "--num-prompts", "3", "--input-len", "20", "--output-len", "4", "--output-json", str(path)]) == 0

    result = json.loads(path.read_text())
    assert (result["num_requests"], result["total_input_tokens"], result["total_output_tokens"]) == (3, 60, 12)
    assert result["tokens_per_second"] == pytest.approx(72 / result["elapsed_time"])
    assert result["run"]["padding_waste"] == pytest.approx(0.5)
    assert result["roofline"]["mbu"] > 0
    assert "tokens_per_second:" in capsys.readouterr().out


def test_latency_prints_and_writes_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "out.json"
    argv = ["bench", "latency", "--input-len", "8", "--output-len", "4", "--batch-size", "2", "--num-iters", "3", "--num-iters-warmup", "1"]

    assert main([*argv, "--no-roofline", "--output-json", str(path)]) == 0

    result = json.loads(path.read_text())
    assert len(result["latencies"]) == 3
    assert result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 3)
    assert set(result["percentiles"]) == {"10", "25", "50", "75", "90", "99"}
    assert result["roofline"] == {}
    assert "avg_latency:" in capsys.readouterr().out


def test_a_run_that_compiled_is_flagged(device: type[Device], capsys: pytest.CaptureFixture[str]):
    device.compiles_from = 0

    main(["bench", "throughput", "--num-prompts", "1", "--input-len", "4", "--output-len", "2", "--no-roofline"])

    assert "programs were compiled during the measured run" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv", [["latency", "--batch-size", "0"], ["latency", "--output-json", "/no/where.json"], ["throughput", "--num-warmups", "-1"]]
)
def test_impossible_flags_are_refused_before_an_engine_starts(argv: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch, "start_engine", lambda config: pytest.fail("an engine was started"))

    assert main(["bench", *argv, "--no-roofline"]) == 2
