"""From a text, a pair or token ids to a checked `EngineRequest` of a pooling model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxllm.core_types import EngineInfo, EngineRequest, PoolingInfo
from jaxllm.engine.input_processor import ProcessedRequest, Prompt, check_envelope, check_prompt, check_unicode, read_prompt
from jaxllm.errors import InvalidRequestError
from jaxllm.pooling_params import PoolingParams
from jaxllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxllm.text.tokenizer import Tokenizer

# To the scheduler a pooling request is one that ends with its first result.
_ONE_RESULT = SamplingParams(max_tokens=1, detokenize=False)


class Pair(NamedTuple):
    """Two texts that a cross-encoder reads together."""

    first: str
    second: str


PoolingPrompt = Prompt | Pair


class PoolingProcessor:
    """Checks requests against a started pooling engine and its tokenizer. `priorities`: the engine schedules by priority."""

    def __init__(self, engine: EngineInfo, info: PoolingInfo, tokenizer: Tokenizer, *, priorities: bool = False):
        self._engine = engine
        self.info = info
        self._tokenizer = tokenizer
        self._priorities = priorities

    def process(
        self,
        request_id: str,
        prompt: PoolingPrompt,
        params: PoolingParams,
        *,
        arrival_time: float | None = None,
        priority: int = 0,
        deadline: float | None = None,
        add_special_tokens: bool = True,
    ) -> ProcessedRequest:
        """Check one request; `add_special_tokens` says whether text gets the tokenizer's.

        Raises:
            InvalidRequestError: anything about the request that cannot be served; the message says what would work.
        """
        if not isinstance(params, PoolingParams):
            raise InvalidRequestError(f"pooling_params must be PoolingParams, got {type(params).__name__}", param="pooling_params")
        check_envelope(request_id, priority, deadline, priorities=self._priorities)
        params = self._complete(params)
        text, token_ids, second_start = self._tokenised(prompt, params, add_special_tokens)
        limit = self._engine.max_model_len
        check_prompt(token_ids, limit, f"this model takes at most {limit}; send less", self._engine.vocab_size)
        arrival = time.time() if arrival_time is None else arrival_time
        child = EngineRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            sampling_params=_ONE_RESULT,
            arrival_time=arrival,
            priority=priority,
            deadline=deadline,
            pooling_params=params,
            second_start=second_start,
        )
        return ProcessedRequest(request_id, text, token_ids, _ONE_RESULT, arrival, [child], params)

    def _complete(self, params: PoolingParams) -> PoolingParams:
        """The parameters with the task filled in, where they fit the model."""
        pooling, limit = self.info, self._engine.max_model_len
        params = params.clone(task=params.task or pooling.tasks[0])
        task = params.task
        if task not in pooling.tasks:
            raise InvalidRequestError(f"this model does not {task}; its tasks are {', '.join(pooling.tasks)}", param="task")
        keep = params.truncate_prompt_tokens
        if keep is not None and keep > limit:
            raise InvalidRequestError(
                f"truncate_prompt_tokens={keep} exceeds the {limit} tokens that this model takes; use at most that, or -1",
                param="truncate_prompt_tokens",
            )
        if params.dimensions is not None:
            self._check_dimensions(params.dimensions, task)
        for name in ("returned_token_ids", "step_tag_id"):
            value = getattr(params, name)
            if value is not None and task != "token_classify":
                raise InvalidRequestError(f"{name} belongs to the task token_classify, not to {task}", param=name)
        if params.returned_token_ids is not None and max(params.returned_token_ids) >= pooling.width:
            raise InvalidRequestError(
                f"returned_token_ids holds {max(params.returned_token_ids)}, but answers have {pooling.width} columns",
                param="returned_token_ids",
            )
        return params

    def _check_dimensions(self, dimensions: int, task: str) -> None:
        pooling = self.info
        if task not in ("embed", "token_embed"):
            raise InvalidRequestError(f"dimensions belongs to embeddings, not to {task}", param="dimensions")
        if not pooling.matryoshka:
            raise InvalidRequestError(
                f"dimensions={dimensions}: this model was not trained for shorter embeddings; where it was, say so with "
                'hf_overrides {"is_matryoshka": true}',
                param="dimensions",
            )
        if dimensions > pooling.width or (isinstance(pooling.matryoshka, list) and dimensions not in pooling.matryoshka):
            allowed = pooling.matryoshka if isinstance(pooling.matryoshka, list) else f"1 to {pooling.width}"
            raise InvalidRequestError(f"dimensions={dimensions} is not one of this model's: {allowed}", param="dimensions")

    def _tokenised(self, prompt: PoolingPrompt, params: PoolingParams, special: bool) -> tuple[str | None, list[int], int | None]:
        """Text (None where ids were given), token ids, and where the second text of a pair begins."""
        if isinstance(prompt, Pair):
            return None, *self._encode(prompt.first, prompt.second, params, special)
        text, ids, _ = read_prompt(prompt)
        return (text, *self._encode(text or "", None, params, special)) if ids is None else (text, self._cut(ids, params), None)

    def _encode(self, text: str, second: str | None, params: PoolingParams, special: bool) -> tuple[list[int], int | None]:
        for part in (text, second or ""):
            check_unicode("prompt", part)
        if self.info.lower_case:
            text, second = text.lower(), second and second.lower()
        limit = self._limit(params)
        return self._tokenizer.encode_cut(text, second, limit=limit, side=params.truncation_side, add_special_tokens=special)

    def _limit(self, params: PoolingParams) -> int | None:
        keep = params.truncate_prompt_tokens
        return self._engine.max_model_len if keep == -1 else keep

    def _cut(self, token_ids: Sequence[int], params: PoolingParams) -> list[int]:
        limit = self._limit(params)
        if limit is None:
            return list(token_ids)
        return list(token_ids[:limit] if params.truncation_side == "right" else token_ids[-limit:])


def pair_prompts(
    pooling: PoolingInfo, tokenizer: Tokenizer, queries: Sequence[str], documents: Sequence[str], *, templated: bool
) -> list[PoolingPrompt]:
    """What a cross-encoder reads for each query and document: both with the tokenizer's separators between, or one text after the other.

    `templated`: the user gave a chat template, which puts a query and a document (messages of these roles) together, special tokens
    included.
    """

    def together(query: str, document: str) -> PoolingPrompt:
        if templated:
            messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
            return tokenizer.apply_chat_template(messages, add_generation_prompt=False)
        return Pair(query, document) if pooling.pairs else query + document

    return [together(query, document) for query, document in zip(queries, documents, strict=True)]


def matched_texts(first: Any, second: Any, names: tuple[str, str]) -> tuple[list[str], list[str]]:
    """Texts to be compared, as two lists of one length: one with one, one with each of several, or each with its counterpart.

    Raises:
        InvalidRequestError: something that is no text, no text at all, or lengths that do not fit.
    """
    lists = []
    for name, given in zip(names, (first, second), strict=True):
        texts = [given] if isinstance(given, str) else given
        if not isinstance(texts, Sequence) or not texts or not all(isinstance(text, str) for text in texts):
            raise InvalidRequestError(f"{name} must be a text or a list of at least one text, got {given!r:.100}", param=name)
        lists.append(list(texts))
    one, other = lists
    if len(one) != len(other) and len(one) != 1:
        raise InvalidRequestError(
            f"{names[0]} has {len(one)} texts and {names[1]} has {len(other)}: give one for all, or as many of each", param=names[0]
        )
    return (one * len(other) if len(one) == 1 else one), other


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    """The cosine of the angle between two vectors; 0 where one has no direction."""
    lengths = float(np.linalg.norm(one)) * float(np.linalg.norm(other))
    return float(one @ other) / lengths if lengths else 0.0
