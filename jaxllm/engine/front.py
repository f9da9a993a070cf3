"""The text side of an engine: what `LLM` and `AsyncLLM` share around their clients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxllm.config import EngineConfig, ModelConfig
from jaxllm.core_types import EngineInfo
from jaxllm.engine.generation_config import GenerationDefaults, generation_defaults
from jaxllm.engine.input_processor import InputProcessor
from jaxllm.engine.output_processor import OutputProcessor

if TYPE_CHECKING:
    from jaxllm.model_files import ModelFiles
    from jaxllm.text.tokenizer import Tokenizer


class Front:
    """Tokenizer and defaults of a model, and the processors of a started engine's requests."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer, defaults: GenerationDefaults, info: EngineInfo):
        self.tokenizer = tokenizer
        self.defaults = defaults
        self.input = InputProcessor(
            info,
            tokenizer,
            defaults,
            max_logprobs=config.model.max_logprobs,
            priorities=config.scheduler.scheduling_policy == "priority",
        )
        self.output = OutputProcessor(tokenizer)


def load_text_side(config: ModelConfig, files: ModelFiles) -> tuple[Tokenizer, GenerationDefaults]:
    """Load the tokenizer and resolve the sampling defaults; neither needs the engine, so both can load beside it.

    Raises:
        ModelLoadError: the model has no usable tokenizer.
        ConfigError: an override of the generation config that cannot be honoured.
    """
    from jaxllm.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(files)
    defaults = generation_defaults(
        config.generation_config,
        config.override_generation_config,
        generation_config=files.generation_config,
        eos_token_ids=[*files.eos_token_ids, tokenizer.eos_token_id],
    )
    return tokenizer, defaults
