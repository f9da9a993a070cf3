"""What is answered to requests to pooling models."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from jaxllm.server.responses import Usage

Item = TypeVar("Item")


class Embedding(msgspec.Struct, kw_only=True):
    object: str = "embedding"
    index: int
    embedding: list[float] | str


class PooledData(msgspec.Struct, kw_only=True):
    object: str = "pooling"
    index: int
    data: Any


class Classified(msgspec.Struct, kw_only=True):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class Score(msgspec.Struct, kw_only=True):
    object: str = "score"
    index: int
    score: float


class ListOf(msgspec.Struct, Generic[Item], kw_only=True):
    """What all but /rerank answer with: an item for each input."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Item]
    usage: Usage


class Embeddings(ListOf[Embedding]):
    """Body of a response of /v1/embeddings."""


class PooledList(ListOf[PooledData]):
    """Body of a response of /pooling."""


class Classification(ListOf[Classified]):
    """Body of a response of /classify."""


class Scores(ListOf[Score]):
    """Body of a response of /score."""


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
