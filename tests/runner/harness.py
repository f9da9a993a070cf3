"""A real engine over a directory, without the front: token ids in, token ids out."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax

from jaxllm.config import CacheConfig, CompileConfig
from jaxllm.core_types import CacheKind, CacheSpec, EngineOutput, EngineRequest, TokenLogprobs
from jaxllm.engine.core import EngineCore
from jaxllm.engine.scheduler import Scheduler
from jaxllm.models.build import define_model
from jaxllm.ops.attention import choose_backend
from jaxllm.runner.memory import Limits, plan_memory
from jaxllm.runner.mesh import Placement, make_mesh
from jaxllm.runner.model_runner import ModelRunner
from jaxllm.sampling_params import SamplingParams
from jaxllm.weights.hf import open_checkpoint
from jaxllm.weights.rules import load_params


@dataclass
class Generated:
    tokens: list[int]
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    error: str | None = None
    num_cached_tokens: int | None = None
    num_preemptions: int = 0


class Engine:
    """EngineCore and ModelRunner over a Hugging Face directory, with small limits; buckets compile when needed."""

    def __init__(
        self,
        directory: Path,
        *,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        page_size: int = 8,
        max_model_len: int | None = None,
        num_pages: int | Mapping[CacheKind, int] | None = None,
        tensor_parallel_size: int = 1,
        async_scheduling: bool = True,
        enable_prefix_caching: bool = True,
        policy: str = "fcfs",
        dtype: str = "float32",
        num_sampled_ids: int | None = None,
        lazy: bool = True,
    ):
        config = json.loads((directory / "config.json").read_text())
        placement = Placement(make_mesh(tensor_parallel_size))
        backend = choose_backend("cpu")
        model_def = define_model(config, dtype=dtype, tensor_parallel_size=tensor_parallel_size, max_model_len=max_model_len)
        limits = Limits(max_num_seqs, max_num_batched_tokens, page_size)
        cache = CacheConfig(kv_cache_memory_bytes=64 * 2**20)
        plan = plan_memory(model_def, backend, placement, cache, limits, max_model_len=max_model_len)
        if num_pages is not None:
            counts = num_pages if isinstance(num_pages, Mapping) else dict.fromkeys(CacheKind, num_pages)
            groups = tuple(replace(group, num_pages=counts[group.kind]) for group in plan.cache_spec.groups)
            plan = type(plan)(**{**plan.__dict__, "cache_spec": CacheSpec(page_size, groups)})
        params = load_params(model_def, open_checkpoint(directory), lambda name, array: placement.put(array, model_def.axes[name]))
        self.runner = ModelRunner(
            model_def,
            params,
            plan,
            limits,
            placement,
            backend,
            CompileConfig(enforce_eager=lazy),
            num_sampled_ids=num_sampled_ids or model_def.vocab_size,
        )
        self.temp_bytes = self.runner.warm_up()
        scheduler = Scheduler(
            plan.cache_spec,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=plan.max_model_len,
            policy=policy,
            enable_prefix_caching=enable_prefix_caching,
        )
        self.core = EngineCore(scheduler, self.runner, async_scheduling=async_scheduling)
        self._count = 0

    def add(self, prompt: Sequence[int], params: SamplingParams, **fields) -> str:
        self._count += 1
        request_id = f"r{self._count}"
        self.core.add_request(
            EngineRequest(
                request_id=request_id,
                prompt_token_ids=[int(t) for t in prompt],
                sampling_params=params,
                arrival_time=time.time(),
                **fields,
            )
        )
        return request_id

    def run(self, max_steps: int = 5000) -> dict[str, Generated]:
        """Step until nothing is left."""
        results: dict[str, Generated] = {}
        for _ in range(max_steps):
            if not self.core.has_work:
                return results
            for output in self.core.step().outputs:
                self._collect(results.setdefault(output.request_id, Generated([], [])), output)
        raise AssertionError(f"requests still run after {max_steps} steps")

    @staticmethod
    def _collect(result: Generated, output: EngineOutput) -> None:
        result.tokens += output.new_token_ids
        result.logprobs += output.logprobs or []
        result.prompt_logprobs = output.prompt_logprobs or result.prompt_logprobs
        result.finish_reason = output.finish_reason or result.finish_reason
        result.error = output.error or result.error
        result.num_preemptions = max(result.num_preemptions, output.num_preemptions)
        if output.num_cached_tokens is not None:
            result.num_cached_tokens = output.num_cached_tokens

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]) -> list[Generated]:
        """Run all prompts together, in order."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        ids = [self.add(prompt, p) for prompt, p in zip(prompts, each, strict=True)]
        results = self.run()
        return [results[i] for i in ids]


def greedy(max_tokens: int, **fields) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **fields)


def num_devices() -> int:
    return len(jax.devices())
