"""An engine without a model: the real scheduler and step loop over an executor that says what a test wants."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxllm.config import EngineConfig
from jaxllm.core_types import (
    CacheGroup,
    CacheKind,
    CacheSpec,
    EngineInfo,
    NewRow,
    RowResult,
    SchedulerOutput,
    StepResult,
    TokenLogprobs,
)
from jaxllm.engine.core import EngineCore
from jaxllm.engine.scheduler import Scheduler
from jaxllm.errors import ConfigError
from tests.checkpoints import FIRST_BYTE_ID

# (prompt, index of the output token) -> token id
Say = Callable[[Sequence[int], int], int]


def spells(text: str) -> Say:
    """Say the bytes of `text` over and over, whatever the prompt (ids of `checkpoints.write_tokenizer`)."""
    data = text.encode()
    return lambda prompt, index: FIRST_BYTE_ID + data[index % len(data)]


class ScriptedExecutor:
    """An Executor whose next token is `say(prompt, output index)`. Log-probabilities: -0.5 for it, then -1, -2, ... for ids 0, 1, ..."""

    def __init__(self, say: Say, num_pages: int = 128):
        self.cache_spec = CacheSpec(page_size=16, groups=(CacheGroup(kind=CacheKind.FULL, layers=(0,), num_pages=num_pages),))
        self.say = say
        self.slots: dict[int, NewRow] = {}
        self.num_steps = 0
        self.is_shut_down = False

    def execute(self, step: SchedulerOutput) -> Any:
        self.num_steps += 1
        self.slots |= {row.slot: row for row in step.new_rows}
        results = []
        for row in step.rows:
            new = self.slots[row.slot]
            prompt, end = new.token_ids[: new.prompt_len], row.start + row.num_tokens
            result = RowResult()
            if new.sampling_params.prompt_logprobs is not None:
                result.prompt_logprobs = [TokenLogprobs([prompt[i]], [-1.0], 1) for i in range(row.start + 1, min(end + 1, new.prompt_len))]
            if row.samples:
                result.token_id = self.say(prompt, end - new.prompt_len)
                if new.sampling_params.logprobs is not None:
                    top = range(new.sampling_params.logprobs)
                    result.logprobs = TokenLogprobs([result.token_id, *top], [-0.5, *(-1.0 - i for i in top)], 1)
            results.append(result)
        return _Done(StepResult(results, step.num_tokens))

    def shutdown(self) -> None:
        self.is_shut_down = True


class _Done:
    def __init__(self, result: StepResult):
        self._result = result

    def result(self) -> StepResult:
        return self._result


def scripted_engine(config: EngineConfig, say: Say, *, max_model_len: int = 512, num_pages: int = 128) -> tuple[EngineCore, EngineInfo]:
    """What `launch.start_engine` gives, over a ScriptedExecutor."""
    executor = ScriptedExecutor(say, num_pages)
    options = config.scheduler
    info = EngineInfo(
        max_model_len=config.model.max_model_len or max_model_len,
        vocab_size=512,
        page_size=16,
        num_pages=num_pages,
        max_num_seqs=options.max_num_seqs or 8,
        max_num_batched_tokens=options.max_num_batched_tokens or 64,
        dtype="float32",
        platform="cpu",
    )
    scheduler = Scheduler(
        executor.cache_spec,
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
        max_model_len=info.max_model_len,
        policy=options.scheduling_policy,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        max_num_queued_reqs=options.max_num_queued_reqs,
    )
    return EngineCore(scheduler, executor, async_scheduling=options.async_scheduling), info


# --------------------------------------------------------------------------- factories for an engine process


def start_hello(config: EngineConfig) -> tuple[EngineCore, EngineInfo]:
    """Says "hello " over and over."""
    return scripted_engine(config, spells("hello "))


def start_slow(config: EngineConfig) -> tuple[EngineCore, EngineInfo]:
    """Says "hello " over and over, five milliseconds a step."""
    hello = spells("hello ")

    def say(prompt: Sequence[int], index: int) -> int:
        time.sleep(0.005)
        return hello(prompt, index)

    return scripted_engine(config, say)


def start_refused(config: EngineConfig) -> tuple[EngineCore, EngineInfo]:
    raise ConfigError("block_size 7 cannot work; 8 would")


def start_never(config: EngineConfig) -> tuple[EngineCore, EngineInfo]:
    time.sleep(600)
    raise AssertionError
