"""Where engine and runner are put together: from a config to an engine that is ready to step."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from jaxllm.config import EngineConfig
from jaxllm.core_types import CacheKind, EncoderInfo, EngineInfo, Executor
from jaxllm.engine.core import EngineCore
from jaxllm.engine.scheduler import Scheduler
from jaxllm.engine.structured_output import GrammarMasks
from jaxllm.errors import ConfigError
from jaxllm.model_files import ModelFiles
from jaxllm.text.grammar_compiler import grammar_compiler

if TYPE_CHECKING:
    import jax

    from jaxllm.models.build import ModelDef
    from jaxllm.runner.memory import Limits, MemoryPlan
    from jaxllm.runner.mesh import Placement
    from jaxllm.text.tokenizer import Tokenizer
    from jaxllm.weights.checkpoint import Checkpoint
    from jaxllm.weights.sentence_transformers import SentenceModules

logger = logging.getLogger(__name__)

# An encoder's input must fit a step: where the user says nothing, a step takes the longest one, up to this.
_LONGEST_BY_DEFAULT = 8192
_COMPUTE_DTYPES = ("float32", "bfloat16", "float16")


# Of glibc's mallopt: threads share two heaps (in one, those of jax wait for each other; in more, blocks of logits come and go), no block
# comes from the kernel by itself, and only so much free space is given back.
_M_ARENA_MAX, _M_MMAP_MAX, _M_TRIM_THRESHOLD = (-8, 2), (-4, 0), (-1, 1 << 30)


def _keep_freed_memory() -> None:
    """Keep memory that is freed: on CPU the buffers of every step come and go, and fresh pages took a third of its time."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        for parameter, value in (_M_ARENA_MAX, _M_MMAP_MAX, _M_TRIM_THRESHOLD):
            libc.mallopt(parameter, value)


def start_engine(
    config: EngineConfig, files: ModelFiles | None = None, tokenizer: Tokenizer | None = None
) -> tuple[EngineCore, EngineInfo]:
    """Load the model that `config` names and make an engine of it. Imports jax; takes seconds to minutes.

    `files` and `tokenizer` save the work of finding and loading them again where the caller has them.

    Raises:
        ConfigError: options that the model or the devices cannot have.
        ModelLoadError: a model that cannot be found, read or loaded.
        OutOfMemoryPlanError: a memory plan that cannot fit; raised before anything is allocated.
    """
    phases = Phases()
    with phases("resolve"):
        if files is None:
            from jaxllm.weights.download import resolve_model

            files = resolve_model(config.model)
        if tokenizer is None:
            from jaxllm.text.tokenizer import load_tokenizer

            tokenizer = load_tokenizer(files)
    with phases("jax"):
        _keep_freed_memory()
        # What jax takes of a GPU when it starts; else three quarters.
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(config.cache.gpu_memory_utilization))
        import jax

        from jaxllm.ops.attention import choose_backend
        from jaxllm.runner.compile import enable_persistent_cache
        from jaxllm.runner.mesh import Placement, make_mesh
        from jaxllm.weights.sentence_transformers import read_modules

        enable_persistent_cache(config.compile)
        placement = Placement(make_mesh(config.parallel.tensor_parallel_size))
        device = placement.mesh.devices.flat[0]
        platform = device.platform
        backend = choose_backend(platform, device.device_kind)
    modules = read_modules(files.path) if files.kind == "hf" and config.model.runner != "generate" else None
    if _pools(config, files, modules):
        from jaxllm.launch_pooling import start_pooling

        return start_pooling(config, files, tokenizer, placement, modules, phases)
    with phases("plan"):
        from jaxllm.runner.memory import plan_memory

        checkpoint = open_weights(config, files)
        dtype = compute_dtype(config, files, checkpoint, platform)
        model_def = define(files, dtype, config, config.model.max_model_len)
        limits = step_limits(config, platform, model_def)
        plan = plan_memory(model_def, backend, placement, config.cache, limits, max_model_len=config.model.max_model_len)
        if plan.max_model_len != (config.model.max_model_len or model_def.max_model_len):
            # Rope scalings may depend on the longest sequence.
            model_def = define(files, dtype, config, plan.max_model_len)
        logger.info(
            "%s, %s, %s on %d %s device(s); %s", files.name, model_def.architecture, dtype, placement.mesh.size, platform, plan.table()
        )
    with phases("load"):
        params = load(model_def, checkpoint, placement, config.model.seed)
        jax.block_until_ready(params)
    with phases("compile"):
        from jaxllm.runner.model_runner import ModelRunner

        runner = ModelRunner(model_def, params, plan, limits, placement, backend, config.compile, num_sampled_ids=tokenizer.vocab_size)
        _compare(plan, runner.warm_up())
        # The other buckets go on compiling while it serves.
        runner.compile_in_background()
    grammars = GrammarMasks(grammar_compiler(tokenizer, model_def.vocab_size), model_def.vocab_size)
    about = {"max_model_len": plan.max_model_len, "vocab_size": model_def.vocab_size, "dtype": dtype, "platform": platform}
    about["encoder"] = _encoder_info(files, model_def, limits)
    return assemble(config, runner, limits, phases, grammars, num_pages=_num_pages(plan), **about)


def assemble(
    config: EngineConfig, runner: Executor, limits: Limits, phases: Phases, grammars: GrammarMasks | None = None, **about: Any
) -> tuple[EngineCore, EngineInfo]:
    """The engine over a runner that can serve; `about` are the other fields of its `EngineInfo`."""
    info = EngineInfo(
        page_size=limits.page_size,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        startup_seconds=phases.seconds,
        **about,
    )
    scheduler = Scheduler(
        runner.cache_spec,
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
        max_model_len=info.max_model_len,
        policy=config.scheduler.scheduling_policy,
        enable_prefix_caching=config.cache.enable_prefix_caching and info.pooling is None,
        max_num_queued_reqs=config.scheduler.max_num_queued_reqs,
        max_num_queued_tokens=config.scheduler.max_num_queued_tokens,
        seed=config.model.seed,
        grammars=grammars,
        pooling=info.pooling is not None,
    )
    logger.info("engine ready: %s", ", ".join(f"{name} {seconds:.1f} s" for name, seconds in info.startup_seconds.items()))
    return EngineCore(scheduler, runner, async_scheduling=config.scheduler.async_scheduling), info


def _pools(config: EngineConfig, files: ModelFiles, modules: SentenceModules | None) -> bool:
    """Whether the model is to be pooled: as the user says, or as it was made."""
    from jaxllm.models.pooling import is_for_pooling

    if config.model.runner != "auto":
        return config.model.runner == "pooling"
    return config.model.convert in ("embed", "classify") or is_for_pooling(files.config, modules)


class Phases:
    """Seconds that each phase of the start took, in order."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - started


def open_weights(config: EngineConfig, files: ModelFiles) -> Checkpoint | None:
    """The weights' headers; None where they are made up."""
    if config.model.load_format == "dummy":
        return None
    if files.kind == "gguf":
        from jaxllm.weights.gguf import open_gguf

        return open_gguf(files.path)
    from jaxllm.weights.hf import open_checkpoint

    return open_checkpoint(files.path)


def compute_dtype(config: EngineConfig, files: ModelFiles, checkpoint: Checkpoint | None, platform: str) -> str:
    """The dtype asked for; for "auto" the checkpoint's, or bfloat16 for GGUF files; on CPU float32."""
    from jaxllm.models.registry import FAMILIES

    if config.model.dtype != "auto":
        return config.model.dtype
    stored = "bfloat16" if files.kind == "gguf" else _stored_dtype(files.config, checkpoint)
    if platform == "cpu":
        if files.kind != "gguf" and stored in _COMPUTE_DTYPES and stored != "float32":
            logger.info("computing in float32: %s is slower on CPU; dtype %s halves the memory", stored, stored)
        return "float32"
    family = FAMILIES.get((files.config.get("architectures") or [""])[0])
    if stored == "float16" and family is not None and not family.float16:
        logger.warning("the checkpoint is float16, whose range this model's activations exceed: computing in bfloat16")
        return "bfloat16"
    return stored if stored in _COMPUTE_DTYPES else "float32"


def _stored_dtype(hf_config: Mapping[str, Any], checkpoint: Checkpoint | None) -> str:
    """What the config says, or else the dtype of the first tensor."""
    name = next(iter(checkpoint.names()), None) if checkpoint is not None else None
    first = str(checkpoint.dtype(name)) if checkpoint is not None and name is not None else "float32"
    return named_dtype(hf_config) or first


def named_dtype(hf_config: Mapping[str, Any]) -> str | None:
    """The dtype that the config names, if any."""
    for source in (hf_config.get("text_config") or {}, hf_config):
        named = source.get("dtype") or source.get("torch_dtype")
        if named and named != "auto":
            return str(named).removeprefix("torch.")
    return None


def define(files: ModelFiles, dtype: str, config: EngineConfig, max_model_len: int | None) -> ModelDef:
    from jaxllm.models.build import define_model

    tp = config.parallel.tensor_parallel_size
    model_def = define_model(files.config, dtype=dtype, tensor_parallel_size=tp, max_model_len=max_model_len)
    if max_model_len is not None and max_model_len > model_def.max_model_len:
        raise ConfigError(
            f"max_model_len={max_model_len} exceeds the {model_def.max_model_len} positions that the model is made for; lower it, or say "
            f"otherwise with hf_overrides (max_position_embeddings, rope_scaling)"
        )
    return model_def


def _encoder_info(files: ModelFiles, model_def: ModelDef, limits: Limits) -> EncoderInfo | None:
    """What prompts of a model with an encoder are made of; None without one."""
    encoder = model_def.spec.encoder
    if encoder is None:
        return None
    found = {**files.config, **{name: value for name, value in files.generation_config.items() if value is not None}}
    start, forced = found.get("decoder_start_token_id", found.get("bos_token_id")), found.get("forced_bos_token_id")
    if start is None:
        raise ConfigError("config.json lacks decoder_start_token_id, which the decoder's sequences begin with; set it with hf_overrides")
    longest = min(encoder.max_positions, limits.max_num_batched_tokens)
    return EncoderInfo(max_len=longest, decoder_start=[start] if forced is None else [start, forced])


def step_limits(config: EngineConfig, platform: str, model_def: ModelDef) -> Limits:
    """Sizes of a step. A CPU step of many tokens takes seconds, in which nobody else gets a token; accelerators want large ones.

    Pages of 64 positions are gathered a third faster on CPU than pages of 16; TPU page tables must fit scalar memory.
    """
    from jaxllm.runner.memory import Limits

    on_cpu = platform == "cpu"
    whole = min(model_def.spec.encoder.max_positions, _LONGEST_BY_DEFAULT) if model_def.spec.encoder else 0
    return Limits(
        max_num_seqs=config.scheduler.max_num_seqs or (64 if on_cpu else 256),
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens or max(512 if on_cpu else 2048, whole),
        page_size=config.cache.block_size or (128 if platform == "tpu" else 64),
    )


def load(model_def: ModelDef, checkpoint: Checkpoint | None, placement: Placement, seed: int) -> list[jax.Array]:
    from jaxllm.weights.dummy import dummy_params
    from jaxllm.weights.rules import load_params

    def place(name: str, array: Any) -> jax.Array:
        return placement.put(array, model_def.axes[name])

    if checkpoint is None:
        return dummy_params(model_def, place, seed)
    return load_params(model_def, checkpoint, place)


def _compare(plan: MemoryPlan, temporaries: int) -> None:
    """What compiled steps need, with what was planned."""
    needed = plan.weights + plan.sampling_state + temporaries + plan.kv_cache
    logger.debug("compiled steps need %.1f MiB of temporaries, the plan reckoned with %.1f", temporaries / 2**20, plan.temporaries / 2**20)
    if needed > plan.total:
        logger.warning(
            "compiled steps need %.1f MiB of temporaries, so that %.2f GiB are needed in all and %.2f GiB may be used; lower "
            "max_num_batched_tokens, max_num_seqs or kv_cache_memory_bytes if memory runs out",
            temporaries / 2**20,
            needed / 2**30,
            plan.total / 2**30,
        )


def _num_pages(plan: MemoryPlan) -> int:
    """Pages of the pool that bounds how much fits: full attention's, or the smallest where there is none."""
    full = [group.num_pages for group in plan.cache_spec.groups if group.kind is CacheKind.FULL]
    return min(full or [group.num_pages for group in plan.cache_spec.groups])
