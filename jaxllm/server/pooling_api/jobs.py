"""Running the poolings of one HTTP request: one an input, as many as it has."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from starlette.requests import Request

from jaxllm.core_types import PoolingInfo
from jaxllm.engine.pooling_processor import PoolingPrompt, cosine, matched_texts, pair_prompts
from jaxllm.errors import InvalidRequestError
from jaxllm.outputs import PoolingRequestOutput
from jaxllm.pooling_params import PoolingParams
from jaxllm.server.errors import NotFoundError
from jaxllm.server.generating import EngineJob, final_outputs
from jaxllm.server.pooling_api.protocol import InputRequest, PoolingRequest, VectorRequest
from jaxllm.server.prompts import MAX_SEQUENCES, render_chat, split_prompts
from jaxllm.server.responses import Usage
from jaxllm.server.state import ServerState, Serving, request_scope

# As many as OpenAI takes in a request for embeddings.
MAX_INPUTS = 2048


@dataclass(kw_only=True)
class PoolingJob(EngineJob[PoolingPrompt, PoolingRequestOutput]):
    """Inputs to be pooled: each stream has one output."""

    params: PoolingParams
    add_special_tokens: bool
    outputs: list[PoolingRequestOutput] = field(default_factory=list)

    async def _one(self, request_id: str, prompt: PoolingPrompt) -> AsyncGenerator[PoolingRequestOutput, None]:
        options: dict[str, Any] = {"priority": self.priority, "deadline": self.deadline, "add_special_tokens": self.add_special_tokens}
        try:
            async with aclosing(self.serving.engine.encode(prompt, self.params, request_id, **options)) as outputs:
                async for output in outputs:
                    yield output
        except InvalidRequestError as error:
            raise error.renamed(self.field_names) from error

    @property
    def usage(self) -> Usage:
        tokens = sum(len(output.prompt_token_ids) for output in self.outputs)
        return Usage(tokens, 0, tokens)

    @property
    def arrays(self) -> list[np.ndarray]:
        return [output.outputs.data for output in self.outputs]


def pooling_of(serving: Serving) -> PoolingInfo:
    """What the model answers with. Raises NotFoundError where it generates."""
    if serving.engine.info.pooling is None:
        raise NotFoundError("this model generates text and gives no vectors; serve a pooling model, or start with --runner pooling")
    return serving.engine.info.pooling


async def run_inputs(state: ServerState, request: Request, body: InputRequest, params: PoolingParams, prefix: str) -> PoolingJob:
    """Pool the inputs of a request, or its conversation."""
    special = body.add_special_tokens
    if body.messages is not None:
        text = await render_chat(state, body.messages, body)
        return await run_prompts(state, request, body, [text], params, prefix, "messages", add_special_tokens=bool(special))
    prompts = split_prompts(body.input, "input", MAX_INPUTS)
    return await run_prompts(state, request, body, prompts, params, prefix, "input", add_special_tokens=special is not False)


async def run_prompts(
    state: ServerState,
    request: Request,
    body: PoolingRequest,
    prompts: Sequence[PoolingPrompt],
    params: PoolingParams,
    prefix: str,
    param: str,
    *,
    add_special_tokens: bool = True,
) -> PoolingJob:
    """Pool prompts, all at once; the first failure ends the others.

    Raises:
        InvalidRequestError: something about the request cannot be served.
    """
    names = {"prompt": param}
    job = PoolingJob.open(
        state, request, body, prefix=prefix, prompts=prompts, params=params, add_special_tokens=add_special_tokens, field_names=names
    )
    async with request_scope(state, request.receive):
        job.outputs = await final_outputs(job.start())
    return job


async def run_scores(
    state: ServerState, request: Request, body: PoolingRequest, texts: tuple[Any, Any], names: tuple[str, str], prefix: str
) -> tuple[PoolingJob, list[float]]:
    """How well texts belong together: by a cross-encoder, or by the cosine of embeddings."""
    pooling = pooling_of(state.serving)
    first, second = matched_texts(*texts, names)
    if len(second) > MAX_SEQUENCES:
        raise InvalidRequestError(
            f"{names[1]} may hold at most {MAX_SEQUENCES} texts, got {len(second)}; split them over requests", param=names[1]
        )
    special = body.add_special_tokens is not False
    if "embed" not in pooling.tasks:
        pooling.check_scores()
        templated = state.serving.engine.config.model.chat_template is not None
        prompts = pair_prompts(pooling, state.serving.engine.tokenizer, first, second, templated=templated)
        special = special and not templated
        job = await run_prompts(state, request, body, prompts, body.params("classify"), prefix, names[1], add_special_tokens=special)
        return job, [float(array[0]) for array in job.arrays]
    each = list(dict.fromkeys((*first, *second)))
    job = await run_prompts(state, request, body, each, body.params("embed"), prefix, names[1], add_special_tokens=special)
    vectors = dict(zip(each, job.arrays, strict=True))
    return job, [cosine(vectors[one], vectors[other]) for one, other in zip(first, second, strict=True)]


def encoded(array: np.ndarray, body: VectorRequest) -> Any:
    """Numbers as the request wants them: lists, or the base64 of their bytes."""
    if body.encoding_format == "float":
        return array.tolist()
    kind = np.dtype(body.embed_dtype).newbyteorder(body.endianness)
    return base64.b64encode(array.astype(kind).tobytes()).decode()
