"""`jaxllm serve` hands the right configs to the server, and its presets parse."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from jaxllm.cli.main import main
from jaxllm.cli.serve import build_parser, configs
from jaxllm.config import EngineConfig
from jaxllm.server.config import ServerConfig

PRESETS = sorted((Path(__file__).parents[2] / "configs").glob("**/*.yaml"))


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineConfig, ServerConfig]]:
    """The configs of every server that a test starts; none is really started."""
    calls: list[tuple[EngineConfig, ServerConfig]] = []
    app: Any = types.ModuleType("jaxllm.server.app")
    app.run_server = lambda engine_config, server_config: calls.append((engine_config, server_config))
    monkeypatch.setitem(sys.modules, "jaxllm.server.app", app)
    return calls


def test_no_flags_serve_the_default_model_with_default_options(served: list[tuple[EngineConfig, ServerConfig]]):
    assert main(["serve"]) == 0
    assert served == [(EngineConfig(), ServerConfig())]


def test_flags_reach_their_configs(served: list[tuple[EngineConfig, ServerConfig]]):
    argv = "serve some/model --port 8001 --served-model-name a b --max-num-seqs 8 --no-enable-prefix-caching --api-key s3cret -tp 2"

    assert main(argv.split()) == 0

    [(engine, server)] = served
    assert (engine.model.model, engine.scheduler.max_num_seqs, engine.cache.enable_prefix_caching) == ("some/model", 8, False)
    assert engine.parallel.tensor_parallel_size == 2
    assert (server.port, server.served_model_name, server.api_key) == (8001, ("a", "b"), ("s3cret",))


def test_a_server_option_that_its_config_refuses_starts_nothing(
    served: list[tuple[EngineConfig, ServerConfig]], capsys: pytest.CaptureFixture[str]
):
    assert main(["serve", "--port", "70000"]) == 2
    assert served == []
    assert "70000" in capsys.readouterr().err


@pytest.mark.parametrize("flag", [
    "--host", "--port", "--uds", "--root-path", "--api-key", "--served-model-name", "--dtype", "--max-model-len", "--max-num-seqs",
    "--max-num-batched-tokens", "--block-size", "--gpu-memory-utilization", "--kv-cache-memory-bytes", "--tensor-parallel-size",
    "--enforce-eager", "--enable-prefix-caching", "--enable-prompt-tokens-details", "--generation-config", "--override-generation-config",
    "--chat-template", "--load-format", "--seed", "--scheduling-policy", "--max-logprobs", "--max-num-queued-reqs",
    "--disable-log-requests",
])  # fmt: skip
def test_promised_flags_exist(flag: str):
    assert flag in {option.flag for option in build_parser().options.values()}


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.name)
def test_presets_parse(preset: Path):
    engine, server = configs(build_parser().parse(["--config", str(preset)]))

    assert (engine, server) != (EngineConfig(), ServerConfig())


def test_there_are_presets():
    assert PRESETS
