"""Engine options: small frozen dataclasses, validated on construction. The command line is generated from them.

Names and defaults are vLLM's wherever we offer the same thing. `None` means "decided at start from the model and the device"; the
resolved values are in `EngineInfo` and in the start-up log.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from jaxllm.errors import ConfigError

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Runner = Literal["auto", "generate", "pooling"]
Convert = Literal["auto", "none", "embed", "classify"]
LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
SchedulingPolicy = Literal["fcfs", "priority"]

_DTYPE_ALIASES = {"half": "float16", "float": "float32"}

# vLLM options that we know and do not offer: refused with a reason instead of "unknown".
NOT_OFFERED = {
    "quantization": "quantized checkpoints and caches are not supported yet",
    "kv_cache_dtype": "quantized caches are not supported yet",
    "trust_remote_code": "model code is never downloaded and run",
    "pipeline_parallel_size": "use tensor_parallel_size",
    "data_parallel_size": "data-parallel serving is not supported yet; start one server per replica",
    "enable_lora": "LoRA adapters are not supported yet",
    "speculative_config": "speculative decoding is not supported yet",
    "swap_space": "preempted requests are recomputed, never swapped",
    "cpu_offload_gb": "weights are not offloaded",
    "guided_decoding_backend": "structured outputs need no option: llguidance follows every grammar",
    "structured_outputs_config": "structured outputs need no option: llguidance follows every grammar",
    "lora_modules": "LoRA adapters are not supported yet",
    "tokenizer_mode": "the tokenizer is read as the model brings it",
    "skip_tokenizer_init": "prompts may be token ids, but the tokenizer is always loaded",
    "task": "runner='pooling' with convert 'embed' or 'classify' says it now",
    "enable_expert_parallel": "each device has a share of every expert: use tensor_parallel_size",
    "distributed_executor_backend": "one process drives all devices of a host",
    "nnodes": "serving over several hosts is not supported yet",
    "enable_chunked_prefill": "long prompts are always cut into chunks of max_num_batched_tokens",
    "enable_sleep_mode": "weights and caches stay on the device",
    "kv_transfer_config": "caches are not transferred between servers",
    "limit_mm_per_prompt": "only text models are supported yet",
    "compilation_config": "XLA compiles every step; see enforce_eager and compilation_cache_dir",
    "otlp_traces_endpoint": "servers alone send traces: it is an option of theirs",
}
# What these may be set to, since it is what happens anyway, so that a vLLM script may keep it; None for all, and False for the others.
_HAPPENS_ANYWAY: dict[str, Any] = {
    "tokenizer_mode": "auto",
    "guided_decoding_backend": "auto",
    "structured_outputs_config": {"backend": "auto"},
    "enable_chunked_prefill": True,
    "nnodes": 1,
    "kv_cache_dtype": "auto",
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "swap_space": 0,
    "cpu_offload_gb": 0,
}


def happens_anyway(name: str, value: Any) -> bool:
    """Whether an option that is not offered is set to what is done without it."""
    expected = _HAPPENS_ANYWAY.get(name, False)
    # True equals 1, and is no number of devices.
    return value is None or (value == expected and isinstance(value, bool) == isinstance(expected, bool))


def option(default: Any, help: str, **metadata: Any) -> Any:
    """A dataclass field with the help text and hints that the command line shows; `low` and `above` bound its numbers."""
    return dataclasses.field(default=default, metadata={"help": help, **metadata})


def check_fields(config: Any) -> None:
    """Check a dataclass of options against the choices that its annotations give, and the bounds that its fields have.

    Raises:
        ConfigError: a field is outside of them; None is where it is the default.
    """
    hints = get_type_hints(type(config))
    for field in dataclasses.fields(config):
        name, value, bounds = field.name, getattr(config, field.name), field.metadata
        if value is None and field.default is None:
            continue
        choices = get_args(hints[name]) if get_origin(hints[name]) is Literal else ()
        if choices and value not in choices:
            raise ConfigError(f"{name} must be one of {', '.join(choices)}; got {value!r}")
        kind, what = ((int, float), "a number") if isinstance(field.default, float) or "above" in bounds else (int, "an integer")
        is_number = isinstance(value, kind) and not isinstance(value, bool) and value < math.inf
        if "low" in bounds and not (is_number and value >= bounds["low"]):
            raise ConfigError(f"{name} must be {what} of at least {bounds['low']}, got {value!r}")
        if "above" in bounds and not (is_number and value > bounds["above"]):
            raise ConfigError(f"{name} must be {what} above {bounds['above']}, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model, and how its files are read."""

    model: str | None = option(None, "Hugging Face directory, hub id or .gguf file; nothing serves the embedded default model")
    runner: Runner = option("auto", "generate, or pooling (embeddings, classification, scores); auto: as the model's files say")
    convert: Convert = option("auto", "What a pooling model answers with, where that is not what it was made for: embed or classify")
    pooler_config: dict[str, Any] | None = option(None, "JSON object over the model's own: pooling_type (CLS, LAST, MEAN), use_activation")
    tokenizer: str | None = option(None, "Tokenizer directory or hub id, where it is not the model's own")
    revision: str | None = option(None, "Branch, tag or commit on the hub")
    dtype: Dtype = option("auto", "Compute dtype. auto: float32 on CPU; on accelerators the checkpoint's, bfloat16 for GGUF files")
    max_model_len: int | None = option(None, "Context length in tokens. Default: the model's own, as far as memory allows", low=2)
    max_logprobs: int = option(20, "Largest `logprobs` a request may ask for (-1: no limit)", low=-1)
    seed: int = option(0, "Seed of requests that bring none")
    load_format: LoadFormat = option("auto", "Format of the weights; dummy: random weights of the model's shape")
    generation_config: str = option(
        "auto", "Where sampling defaults come from: auto (the model's generation_config.json), a directory, or vllm (neutral defaults)"
    )
    override_generation_config: dict[str, Any] | None = option(None, "JSON object laid over the generation config")
    hf_overrides: dict[str, Any] | None = option(None, "JSON object laid over config.json")
    chat_template: str | None = option(None, "Chat template: a file, or the template itself on one line")

    def __post_init__(self) -> None:
        if self.dtype in _DTYPE_ALIASES:
            object.__setattr__(self, "dtype", _DTYPE_ALIASES[self.dtype])
        check_fields(self)
        if self.runner == "generate" and (self.convert not in ("auto", "none") or self.pooler_config):
            raise ConfigError("convert and pooler_config belong to runner='pooling'; leave them out, or choose that runner")
        for name in ("override_generation_config", "hf_overrides", "pooler_config"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Mapping):
                raise ConfigError(f"{name} must be an object of names and values, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int | None = option(None, "Positions per KV page, a power of two", low=8)
    gpu_memory_utilization: float = option(0.92, "Share of device memory that weights, temporaries and KV pages may take together")
    kv_cache_memory_bytes: int | None = option(None, "Bytes for KV pages per device; overrides the share above", low=1)
    enable_prefix_caching: bool = option(True, "Reuse the KV pages of equal prompt prefixes")

    def __post_init__(self) -> None:
        check_fields(self)
        if self.block_size is not None and self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size must be a power of two, got {self.block_size}; 16, 32, 64 and 128 work")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization must be above 0 and at most 1, got {self.gpu_memory_utilization}")


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """How requests share steps."""

    max_num_seqs: int | None = option(None, "Most requests running at once", low=1)
    max_num_batched_tokens: int | None = option(None, "Most tokens computed in one step; longer prompts are cut into chunks", low=1)
    scheduling_policy: SchedulingPolicy = option("fcfs", "fcfs, or priority (lower values first, ties by arrival)")
    max_num_queued_reqs: int | None = option(None, "Most requests waiting; more are refused with 503. Default: unbounded", low=1)
    max_num_queued_tokens: int | None = option(None, "Most tokens of waiting prompts; more are refused with 503. Default: unbounded", low=1)
    async_scheduling: bool = option(True, "Schedule the next step while the device runs this one")

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the model is spread over devices."""

    tensor_parallel_size: int = option(1, "Devices that share each layer", alias="-tp", low=1)

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class CompileConfig:
    """Compilation of the step."""

    enforce_eager: bool = option(False, "Compile each shape when it is first needed instead of ahead of time in the background")
    compilation_cache_dir: str | None = option(None, "Directory of the persistent compilation cache. Default: in the user's cache folder")
    compilation_cache: bool = option(True, "Keep compiled programs for the next start")


CONFIG_GROUPS: dict[str, type] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "parallel": ParallelConfig,
    "compile": CompileConfig,
}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything an engine needs to start."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    cache: CacheConfig = dataclasses.field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = dataclasses.field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)
    compile: CompileConfig = dataclasses.field(default_factory=CompileConfig)

    @classmethod
    def from_options(cls, **options: Any) -> EngineConfig:
        """Build from flat option names, as `LLM(**options)` and the command line have them.

        Raises:
            ConfigError: an unknown option (the message offers the nearest known one), one that is not offered, or a bad value.
        """
        known = {field.name: group for group, kind in CONFIG_GROUPS.items() for field in dataclasses.fields(kind)}
        chosen: dict[str, dict[str, Any]] = {group: {} for group in CONFIG_GROUPS}
        for name, value in options.items():
            if name in known:
                chosen[known[name]][name] = value
            elif name in NOT_OFFERED:
                if not happens_anyway(name, value):
                    raise ConfigError(f"{name}={value!r}: {NOT_OFFERED[name]}")
            else:
                near = difflib.get_close_matches(name, known, n=1)
                raise ConfigError(f"unknown option {name!r}" + (f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"))
        return cls(**{group: kind(**chosen[group]) for group, kind in CONFIG_GROUPS.items()})

    def to_json(self) -> str:
        """All options as JSON (sent to the engine process, and printed by `collect-env`)."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> EngineConfig:
        groups = json.loads(text)
        return cls.from_options(**{name: value for group in groups.values() for name, value in group.items()})
