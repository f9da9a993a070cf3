"""What users get back: vLLM's `RequestOutput`, `CompletionOutput` and `Logprob`, and the outputs of pooling requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np


class Logprob(NamedTuple):
    """Log-probability of one token, its rank in the vocabulary (1 = most likely) and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


# One dict a position. The sampled (or prompt) token is always in it, so there may be one entry more than was asked for.
# The first position of a prompt has no prediction: None.
SampleLogprobs = list[dict[int, Logprob]]
PromptLogprobs = list[dict[int, Logprob] | None]


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence of a request.

    `finish_reason` is stop, length, abort or error (None while running); `stop_reason` is the stop string, the stop token id, or
    None when the end-of-sequence token or a limit ended it.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: SampleLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request in seconds since the epoch; None where a stage was not reached."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0


@dataclass(slots=True)
class RequestOutput:
    """The state of one request: its prompt and its sequences so far. `error` says why sequences ended with finish reason "error".

    Of a model with an encoder, `prompt` and `prompt_token_ids` are what the decoder began with.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    num_cached_tokens: int | None = None
    error: str | None = None
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None


@dataclass(slots=True)
class PoolingOutput:
    """`data` is float32: [width], or [tokens, width] where each token has an answer."""

    data: np.ndarray


@dataclass(slots=True)
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """`probs` has one entry a class; logits where the request turned the activation off."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    score: float


@dataclass(slots=True)
class PoolingRequestOutput:
    """The answer to one pooling request. `outputs` is a `PoolingOutput`; of `embed`, `classify` and `score` what the subclasses say."""

    request_id: str
    outputs: Any
    prompt_token_ids: list[int]
    finished: bool = True
    prompt: str | None = None
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0


class EmbeddingRequestOutput(PoolingRequestOutput):
    """`outputs` is an `EmbeddingOutput`."""


class ClassificationRequestOutput(PoolingRequestOutput):
    """`outputs` is a `ClassificationOutput`."""


class ScoringRequestOutput(PoolingRequestOutput):
    """`outputs` is a `ScoringOutput`. `prompt_token_ids` are those of both texts."""


@dataclass(slots=True)
class BeamSearchSequence:
    """One beam: its tokens (prompt included), its text and its cumulative log-probability."""

    tokens: list[int]
    cum_logprob: float
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: SampleLogprobs = field(default_factory=list)


@dataclass(slots=True)
class BeamSearchOutput:
    """The finished beams of one prompt, best first."""

    sequences: list[BeamSearchSequence]


@dataclass(frozen=True, slots=True)
class Metric:
    """One value of `LLM.get_metrics()`: a counter, a gauge or a histogram (then `value` maps bucket bounds to counts)."""

    name: str
    kind: str
    value: Any
