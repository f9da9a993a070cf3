"""Engine factories that a child process can import."""

from __future__ import annotations

import os
import signal
import time

from jaxllm.config import EngineConfig
from jaxllm.core_types import EngineInfo
from jaxllm.engine.core import EngineCore
from jaxllm.errors import ConfigError
from tests.engine.harness import make_core
from tests.engine.mock_runner import VOCAB, cache_spec


def start(config: EngineConfig) -> tuple[EngineCore, EngineInfo]:
    """The mock device; `seed` is how many milliseconds each step takes."""
    core = make_core(
        cache_spec(8, 400),
        runner={"fail_compute": lambda step: time.sleep(config.model.seed / 1000)},
        max_model_len=1000,
        max_num_queued_reqs=config.scheduler.max_num_queued_reqs,
    )
    info = EngineInfo(
        max_model_len=1000,
        vocab_size=VOCAB,
        page_size=8,
        num_pages=400,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        dtype="float32",
        platform="mock",
    )
    return core, info


def start_refused(config: EngineConfig) -> tuple[EngineCore, EngineInfo]:
    raise ConfigError("block_size 7 cannot work; 8 would")


def start_broken(config: EngineConfig) -> tuple[EngineCore, EngineInfo]:
    try:
        raise ZeroDivisionError("the true cause")
    except ZeroDivisionError as error:
        raise RuntimeError("something went wrong somewhere") from error


def start_killed(config: EngineConfig) -> tuple[EngineCore, EngineInfo]:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def start_slowly(config: EngineConfig) -> tuple[EngineCore, EngineInfo]:
    time.sleep(600)
    raise AssertionError


def start_stuck(config: EngineConfig) -> tuple[EngineCore, EngineInfo]:
    """Steps that never end."""
    core, info = start(config)
    core.executor.fail_compute = lambda step: time.sleep(600)  # type: ignore[attr-defined]
    return core, info


def start_dying(config: EngineConfig) -> tuple[EngineCore, EngineInfo]:
    """A device that is lost at the first step."""
    core, info = start(config)

    def lost(step: object) -> None:
        raise RuntimeError("device lost")

    core.executor.fail_compute = lost  # type: ignore[attr-defined]
    return core, info
