"""What `LLM` does with pooling models: `embed`, `classify`, `score`, `reward` and `encode`, with vLLM's names and signatures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tqdm import tqdm

from jaxllm.config import EngineConfig
from jaxllm.engine.front import Front
from jaxllm.engine.input_processor import ProcessedRequest, Prompt
from jaxllm.engine.pooling_processor import PoolingPrompt, cosine, matched_texts, pair_prompts
from jaxllm.errors import InvalidRequestError, NotSupportedError
from jaxllm.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from jaxllm.pooling_params import PoolingParams

Progress = bool | Callable[..., tqdm]
_Params = PoolingParams | Sequence[PoolingParams] | None


class PoolingMethods(ABC):
    """The pooling half of `LLM`. Outputs are in the order of the prompts.

    Every method raises InvalidRequestError where the model generates, does not know the task, or a prompt or parameter cannot be served
    (nothing was computed then), and RequestFailedError where the engine failed a request.
    """

    config: EngineConfig
    _front: Front
    _ids: Iterator[str]

    @abstractmethod
    def _run_all(self, requests: list[ProcessedRequest], use_tqdm: Progress) -> list[Any]:
        """Run requests to their end; gives their outputs in order."""

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: _Params = None,
        *,
        use_tqdm: Progress = True,
        pooling_task: str | None = None,
        truncate_prompt_tokens: int | None = None,
        **not_offered: Any,
    ) -> list[PoolingRequestOutput]:
        """What the model answers for each prompt, as arrays.

        Args:
            prompts: one prompt or several; text, token ids, {"prompt": ...} or {"prompt_token_ids": ...}.
            pooling_params: for all, or one for each prompt.
            pooling_task: embed, classify, token_embed or token_classify; None is what the model is for.
            truncate_prompt_tokens: for parameters that say nothing of it; see `PoolingParams`.
        """
        refuse(**not_offered)
        return self._encode(prompt_list(prompts), pooling_params, pooling_task, truncate_prompt_tokens, use_tqdm)

    def embed(
        self, prompts: Prompt | Sequence[Prompt], *, pooling_params: _Params = None, use_tqdm: Progress = True, **options: Any
    ) -> list[EmbeddingRequestOutput]:
        """The embedding of each prompt, normalised unless the model's files or `use_activation` say otherwise. Options: as `encode`."""
        outputs = self.encode(prompts, pooling_params, use_tqdm=use_tqdm, pooling_task="embed", **options)
        return [_as(EmbeddingRequestOutput, output, EmbeddingOutput(output.outputs.data.tolist())) for output in outputs]

    def classify(
        self, prompts: Prompt | Sequence[Prompt], *, pooling_params: _Params = None, use_tqdm: Progress = True, **options: Any
    ) -> list[ClassificationRequestOutput]:
        """The probability of each class for each prompt. Options: as `encode`."""
        outputs = self.encode(prompts, pooling_params, use_tqdm=use_tqdm, pooling_task="classify", **options)
        return [_as(ClassificationRequestOutput, output, ClassificationOutput(output.outputs.data.tolist())) for output in outputs]

    def reward(
        self, prompts: Prompt | Sequence[Prompt], *, pooling_params: _Params = None, use_tqdm: Progress = True, **options: Any
    ) -> list[PoolingRequestOutput]:
        """What a reward model gives: for each token, or for the whole prompt, as the model was made. Options: as `encode`."""
        if "token_embed" in self._front.pooling.info.tasks:
            raise InvalidRequestError("this model embeds and gives no rewards; use embed")
        return self.encode(prompts, pooling_params, use_tqdm=use_tqdm, **options)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        use_tqdm: Progress = True,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
        **not_offered: Any,
    ) -> list[ScoringRequestOutput]:
        """How well texts belong together: one with one, one with each of several, or each with its counterpart.

        A cross-encoder reads each pair together; of an embedding model it is the cosine of the two embeddings.
        """
        refuse(**not_offered)
        pooling = self._front.pooling.info
        first, second = matched_texts(data_1, data_2, ("data_1", "data_2"))
        if "embed" not in pooling.tasks:
            pooling.check_scores()
            templated = self.config.model.chat_template is not None
            pairs = pair_prompts(pooling, self._front.tokenizer, first, second, templated=templated)
            outputs = self._encode(pairs, pooling_params, "classify", truncate_prompt_tokens, use_tqdm, special=not templated)
            return [_as(ScoringRequestOutput, output, ScoringOutput(float(output.outputs.data[0]))) for output in outputs]
        texts = list(dict.fromkeys((*first, *second)))
        found = dict(zip(texts, self._encode(texts, pooling_params, "embed", truncate_prompt_tokens, use_tqdm), strict=True))
        return [_cosine(found[one], found[other]) for one, other in zip(first, second, strict=True)]

    def _encode(
        self,
        prompts: Sequence[PoolingPrompt],
        params: _Params,
        task: str | None,
        truncate: int | None,
        use_tqdm: Progress,
        *,
        special: bool = True,
    ) -> list[PoolingRequestOutput]:
        processor = self._front.pooling
        each = one_each("pooling_params", PoolingParams() if params is None else params, prompts)
        requests = [
            processor.process(next(self._ids), prompt, _completed(one, task, truncate), add_special_tokens=special)
            for prompt, one in zip(prompts, each, strict=True)
        ]
        return self._run_all(requests, use_tqdm)


def _completed(params: Any, task: str | None, truncate: int | None) -> Any:
    """`params` with the task and the truncation of the call; anything else is refused where it is checked."""
    if not isinstance(params, PoolingParams):
        return params
    if task is not None and params.task not in (None, task):
        raise InvalidRequestError(f"pooling_params ask for {params.task} in a call for {task}", param="task")
    keep = truncate if params.truncate_prompt_tokens is None else params.truncate_prompt_tokens
    return params.clone(task=task or params.task, truncate_prompt_tokens=keep)


def _as(kind: type, output: PoolingRequestOutput, outputs: Any) -> Any:
    return kind(output.request_id, outputs, output.prompt_token_ids, output.finished, output.prompt, output.metrics)


def _cosine(one: PoolingRequestOutput, other: PoolingRequestOutput) -> ScoringRequestOutput:
    ids = one.prompt_token_ids + other.prompt_token_ids
    return ScoringRequestOutput(
        f"{one.request_id}_{other.request_id}", ScoringOutput(cosine(one.outputs.data, other.outputs.data)), ids, metrics=other.metrics
    )


def refuse(**arguments: Any) -> None:
    """Refuse arguments that are set and not offered."""
    for name, value in arguments.items():
        if value is not None:
            raise NotSupportedError(f"{name} is not supported yet; leave it out", param=name)


def prompt_list(prompts: Any) -> Sequence[Prompt]:
    """`prompts` as a list of prompts: a list of integers is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise InvalidRequestError(
            f"prompts must be text, token ids, a dict with prompt or prompt_token_ids, or a list of these; got {type(prompts).__name__}",
            param="prompts",
        )
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]
    return prompts


def one_each(name: str, given: Any, prompts: Sequence[Any]) -> list[Any]:
    """A value for each prompt, from one for all or a list. Raises InvalidRequestError for a list of another length."""
    each = list(given) if isinstance(given, Iterable) else [given] * len(prompts)
    if len(each) != len(prompts):
        raise InvalidRequestError(f"{name} has {len(each)} entries for {len(prompts)} prompts; give one for each", param=name)
    return each


def progress_bar(use_tqdm: Progress, total: int, desc: str, **options: Any) -> tqdm:
    """The bar that `use_tqdm` asks for, or one that shows nothing."""
    make = use_tqdm if callable(use_tqdm) else tqdm
    return make(total=total, desc=desc, dynamic_ncols=True, disable=not use_tqdm, **options)
