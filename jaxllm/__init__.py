"""jaxllm: serve and batch-run large language models in JAX.

Importing this package imports no jax: the public names load on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxllm.async_llm import AsyncLLM
    from jaxllm.config import EngineConfig
    from jaxllm.llm import LLM
    from jaxllm.outputs import (
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingRequestOutput,
        PoolingRequestOutput,
        RequestOutput,
        ScoringRequestOutput,
    )
    from jaxllm.pooling_params import PoolingParams
    from jaxllm.sampling_params import BeamSearchParams, SamplingParams, StructuredOutputsParams

__version__ = "0.1.0"

_HOME = {
    "LLM": "jaxllm.llm",
    "AsyncLLM": "jaxllm.async_llm",
    "EngineConfig": "jaxllm.config",
    "SamplingParams": "jaxllm.sampling_params",
    "BeamSearchParams": "jaxllm.sampling_params",
    "StructuredOutputsParams": "jaxllm.sampling_params",
    "PoolingParams": "jaxllm.pooling_params",
    "RequestOutput": "jaxllm.outputs",
    "CompletionOutput": "jaxllm.outputs",
    "PoolingRequestOutput": "jaxllm.outputs",
    "EmbeddingRequestOutput": "jaxllm.outputs",
    "ClassificationRequestOutput": "jaxllm.outputs",
    "ScoringRequestOutput": "jaxllm.outputs",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "EngineConfig",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestOutput",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'jaxllm' has no attribute {name!r}")
