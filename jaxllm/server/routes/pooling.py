"""POST /v1/embeddings, /pooling, /classify, /score and /rerank."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from jaxllm.server.body import read_body
from jaxllm.server.openapi import documented
from jaxllm.server.pooling_api.jobs import encoded, pooling_of, run_inputs, run_scores
from jaxllm.server.pooling_api.protocol import ClassifyRequest, EmbeddingRequest, PoolRequest, RerankRequest, ScoreRequest
from jaxllm.server.pooling_api.responses import (
    Classification,
    Classified,
    Embedding,
    Embeddings,
    PooledData,
    PooledList,
    Ranked,
    RankedDocument,
    Ranking,
    Score,
    Scores,
)
from jaxllm.server.responses import json_response
from jaxllm.server.state import State

router = APIRouter(tags=["pooling"])


@router.post("/v1/embeddings", **documented(EmbeddingRequest, Embeddings))
async def embeddings(request: Request, state: State) -> Response:
    """The embedding of each input."""
    pooling_of(state.serving)
    body = await read_body(request, EmbeddingRequest)
    job = await run_inputs(state, request, body, body.params("embed", dimensions=body.dimensions), "embd")
    data = [Embedding(index=i, embedding=encoded(array, body)) for i, array in enumerate(job.arrays)]
    return json_response(Embeddings(id=job.response_id, created=job.created, model=job.model, data=data, usage=job.usage))


@router.post("/pooling", **documented(PoolRequest, PooledList))
async def pooling(request: Request, state: State) -> Response:
    """What the model answers for each input, as it is."""
    pooling_of(state.serving)
    body = await read_body(request, PoolRequest)
    job = await run_inputs(state, request, body, body.params(body.task, dimensions=body.dimensions), "pool")
    data = [PooledData(index=i, data=encoded(array, body)) for i, array in enumerate(job.arrays)]
    return json_response(PooledList(id=job.response_id, created=job.created, model=job.model, data=data, usage=job.usage))


@router.post("/classify", **documented(ClassifyRequest, Classification))
async def classify(request: Request, state: State) -> Response:
    """The class of each input, and the probability of every class."""
    labels = pooling_of(state.serving).labels
    body = await read_body(request, ClassifyRequest)
    job = await run_inputs(state, request, body, body.params("classify"), "classify")
    data = [
        Classified(index=i, label=labels[int(array.argmax(axis=0))], probs=array.tolist(), num_classes=len(array))
        for i, array in enumerate(job.arrays)
    ]
    return json_response(Classification(id=job.response_id, created=job.created, model=job.model, data=data, usage=job.usage))


@router.post("/v1/score", include_in_schema=False)
@router.post("/score", **documented(ScoreRequest, Scores))
async def score(request: Request, state: State) -> Response:
    """How well texts belong together, pair by pair."""
    pooling_of(state.serving)
    body = await read_body(request, ScoreRequest)
    names = body.given()
    job, found = await run_scores(state, request, body, (getattr(body, names[0]), getattr(body, names[1])), names, "score")
    data = [Score(index=i, score=value) for i, value in enumerate(found)]
    return json_response(Scores(id=job.response_id, created=job.created, model=job.model, data=data, usage=job.usage))


@router.post("/v1/rerank", include_in_schema=False)
@router.post("/v2/rerank", include_in_schema=False)
@router.post("/rerank", **documented(RerankRequest, Ranking))
async def rerank(request: Request, state: State) -> Response:
    """Documents by how well they belong to a query, best first; in the shape of Cohere's and Jina's services."""
    pooling_of(state.serving)
    body = await read_body(request, RerankRequest)
    texts = body.texts()
    job, found = await run_scores(state, request, body, (body.query, texts), ("query", "documents"), "rerank")
    order = sorted(range(len(texts)), key=lambda i: -found[i])[: body.top_n or None]
    results = [Ranked(index=i, relevance_score=found[i]) for i in order]
    if body.return_documents is not False:
        for result in results:
            result.document = RankedDocument(texts[result.index])
    return json_response(Ranking(id=job.response_id, model=job.model, usage=job.usage, results=results))
