"""What is answered to requests to pooling models."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from jaxllm.server.responses import Usage


class Embedding(msgspec.Struct, kw_only=True):
    object: str = "embedding"
    index: int
    embedding: list[float] | str


class Embeddings(msgspec.Struct, kw_only=True):
    """Body of a response of /v1/embeddings."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Embedding]
    usage: Usage


class PooledData(msgspec.Struct, kw_only=True):
    object: str = "pooling"
    index: int
    data: Any


class PooledList(msgspec.Struct, kw_only=True):
    """Body of a response of /pooling."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[PooledData]
    usage: Usage


class Classified(msgspec.Struct, kw_only=True):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classification(msgspec.Struct, kw_only=True):
    """Body of a response of /classify."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Classified]
    usage: Usage


class Score(msgspec.Struct, kw_only=True):
    object: str = "score"
    index: int
    score: float


class Scores(msgspec.Struct, kw_only=True):
    """Body of a response of /score."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Score]
    usage: Usage


class RankedDocument(msgspec.Struct):
    text: str


class Ranked(msgspec.Struct, kw_only=True, omit_defaults=True):
    index: int
    document: RankedDocument | UnsetType = UNSET
    relevance_score: float


class Ranking(msgspec.Struct, kw_only=True):
    """Body of a response of /rerank."""

    id: str
    model: str
    usage: Usage
    results: list[Ranked]
