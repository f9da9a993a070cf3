"""The start of a pooling engine: as `launch.start_engine`, without a cache and with whole prompts in each step."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from jaxllm.config import EngineConfig
from jaxllm.core_types import EngineInfo
from jaxllm.engine.core import EngineCore
from jaxllm.errors import ConfigError
from jaxllm.launch import Phases, assemble, compute_dtype, load, open_weights
from jaxllm.model_files import ModelFiles

if TYPE_CHECKING:
    from jaxllm.models.pooling import PoolingDef
    from jaxllm.runner.memory import Limits
    from jaxllm.runner.mesh import Placement
    from jaxllm.text.tokenizer import Tokenizer
    from jaxllm.weights.sentence_transformers import SentenceModules

logger = logging.getLogger(__name__)

# Prompts are not cut into chunks, so the longest one must fit a step: where the user says nothing, this is as far as models go that could
# take more.
_LONGEST_BY_DEFAULT = 8192


def start_pooling(
    config: EngineConfig, files: ModelFiles, tokenizer: Tokenizer, placement: Placement, modules: SentenceModules | None, phases: Phases
) -> tuple[EngineCore, EngineInfo]:
    """Load a pooling model and make an engine of it; raises what `start_engine` raises."""
    import jax

    from jaxllm.runner.memory import check_fits
    from jaxllm.runner.pooling import PoolingRunner
    from jaxllm.weights.sentence_transformers import with_dense_layers

    platform = placement.mesh.devices.flat[0].platform
    with phases("plan"):
        checkpoint = open_weights(config, files)
        if modules is not None and checkpoint is not None:
            checkpoint = with_dense_layers(checkpoint, files.path, [folder for _, folder in modules.dense])
        dtype = compute_dtype(config, files, checkpoint, platform)
        model_def = _define(files, dtype, config, tokenizer, modules, config.model.max_model_len)
        max_model_len, limits = _limits(config, model_def, platform)
        # Rope scalings may depend on the longest sequence.
        model_def = _define(files, dtype, config, tokenizer, modules, max_model_len)
        used = check_fits(model_def, placement, config.cache, limits)
        logger.info("%s, %s, %s on %d %s device(s); %s", files.name, model_def.architecture, dtype, placement.mesh.size, platform, used)
    with phases("load"):
        params = load(model_def, checkpoint, placement, config.model.seed)
        jax.block_until_ready(params)
    with phases("compile"):
        runner = PoolingRunner(model_def, params, limits, placement, config.compile)
        runner.warm_up()
        runner.compile_in_background()
    about = {"max_model_len": max_model_len, "vocab_size": model_def.vocab_size, "dtype": dtype, "platform": platform}
    return assemble(config, runner, limits, phases, num_pages=0, pooling=model_def.info, **about)


def _define(
    files: ModelFiles, dtype: str, config: EngineConfig, tokenizer: Tokenizer, modules: SentenceModules | None, max_model_len: int | None
) -> PoolingDef:
    from jaxllm.models.pooling import define_pooling

    hf_config = dict(files.config)
    return define_pooling(
        hf_config,
        dtype=dtype,
        tensor_parallel_size=config.parallel.tensor_parallel_size,
        max_model_len=max_model_len,
        convert="auto" if config.model.convert == "none" else config.model.convert,
        modules=modules,
        pooler_config=config.model.pooler_config,
        token_ids=_token_ids(hf_config.get("classifier_from_token"), tokenizer),
    )


def _token_ids(tokens: Any, tokenizer: Tokenizer) -> list[int] | None:
    """The ids of the tokens whose rows of the output embedding make a classifier."""
    if tokens is None:
        return None
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise ConfigError(f"classifier_from_token must be a list of tokens, got {tokens!r:.100}")
    ids = [tokenizer.token_to_id(token) for token in tokens]
    missing = [token for token, token_id in zip(tokens, ids, strict=True) if token_id is None]
    if missing:
        raise ConfigError(f"classifier_from_token: {missing[0]!r} is no token of this model")
    return [token_id for token_id in ids if token_id is not None]


def _limits(config: EngineConfig, model_def: PoolingDef, platform: str) -> tuple[int, Limits]:
    """The longest prompt, and the sizes of a step, which takes it whole."""
    from jaxllm.runner.memory import Limits

    own, asked, budget = model_def.spec.max_positions, config.model.max_model_len, config.scheduler.max_num_batched_tokens
    if asked is not None and asked > own:
        raise ConfigError(
            f"max_model_len={asked} exceeds the {own} positions that the model is made for; lower it, or say otherwise with hf_overrides "
            "(max_position_embeddings, rope_scaling)"
        )
    if asked is not None and budget is not None and asked > budget:
        raise ConfigError(
            f"max_num_batched_tokens={budget} is less than max_model_len={asked}, and prompts of pooling models are not cut into chunks; "
            f"raise it to {asked}, or lower max_model_len"
        )
    longest = asked or min(model_def.default_len, budget or _LONGEST_BY_DEFAULT)
    if asked is None and longest < model_def.default_len:
        logger.info("prompts may have %d tokens, of the %d that the model is made for; max_model_len allows more", longest, own)
    on_cpu = platform == "cpu"
    return longest, Limits(
        # Two steps of short prompts, since one is in flight while the next is put together.
        max_num_seqs=config.scheduler.max_num_seqs or (256 if on_cpu else 1024),
        max_num_batched_tokens=budget or max(longest, 1024 if on_cpu else 8192),
        page_size=config.cache.block_size or 16,
    )
