"""The text side of an engine: what `LLM` and `AsyncLLM` share around their clients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxllm.config import EngineConfig, ModelConfig
from jaxllm.core_types import EngineInfo, EngineOutputs, FinishReason
from jaxllm.engine.generation_config import GenerationDefaults, generation_defaults
from jaxllm.engine.input_processor import InputProcessor, ProcessedRequest
from jaxllm.engine.metrics import EngineMetrics
from jaxllm.engine.output_processor import OutputProcessor, Progress, RequestState
from jaxllm.engine.pooling_processor import PoolingProcessor
from jaxllm.errors import InvalidRequestError

if TYPE_CHECKING:
    from jaxllm.model_files import ModelFiles
    from jaxllm.text.tokenizer import Tokenizer


class Front:
    """Tokenizer and defaults of a model, and what keeps track of a started engine's requests: processors and metrics."""

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        defaults: GenerationDefaults,
        info: EngineInfo,
        metrics: EngineMetrics,
    ):
        self.tokenizer = tokenizer
        self.defaults = defaults
        priorities = config.scheduler.scheduling_policy == "priority"
        self.input = InputProcessor(info, tokenizer, defaults, max_logprobs=config.model.max_logprobs, priorities=priorities)
        self._pooling = PoolingProcessor(info, info.pooling, tokenizer, priorities=priorities) if info.pooling else None
        self.output = OutputProcessor(tokenizer)
        self.metrics = metrics

    @property
    def pooling(self) -> PoolingProcessor:
        """The input processor of a pooling model. Raises InvalidRequestError where the model is none."""
        if self._pooling is None:
            raise InvalidRequestError(
                "this model generates text and gives no vectors or scores; start it with runner='pooling', or use a model made for that"
            )
        return self._pooling

    def open(self, request: ProcessedRequest) -> RequestState:
        """A request goes to the engine: follow it from here on."""
        for index, child in enumerate(request.children):
            self.metrics.add_request(child, n=len(request.children) if index == 0 else None)
        return self.output.add(request)

    def take(self, outputs: EngineOutputs) -> Progress:
        """Fold in what the engine sent. The caller tells the engine of `Progress.aborts`."""
        self.metrics.update(outputs)
        progress = self.output.process(outputs.outputs)
        for engine_id, reason in progress.aborts.items():
            self.metrics.finish(engine_id, reason)
        return progress

    def abort(self, request_id: str) -> list[str]:
        """End a request, if it is open, with reason abort. The caller tells the engine of the ids returned."""
        engine_ids = self.output.abort(request_id)
        for engine_id in engine_ids:
            self.metrics.finish(engine_id, FinishReason.ABORT)
        return engine_ids


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
