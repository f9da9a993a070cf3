"""The endpoints of pooling models over a whole server: an embedding model and a cross-encoder, by the clients that people use."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from jaxllm.config import EngineConfig
from jaxllm.server.batch import BatchFiles, run_batch
from jaxllm.server.config import ServerConfig
from tests.golden.pooling_cases import CASES
from tests.pooling_models import CLS, SEP, ids_of, write_pooling_model
from tests.server.helpers import error_of
from tests.server.served import NAME, Served

pytestmark = pytest.mark.heavy

TEXTS = ["the cat sat on the mat", "a dog ran", "sun"]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = write_pooling_model(tmp_path_factory.mktemp("bert"), CASES["bert"].config | {"is_matryoshka": True})
    served = Served(model, "--enforce-eager", max_model_len=64)
    yield served
    served.kill()


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = write_pooling_model(tmp_path_factory.mktemp("cross"), CASES["bert_cross_encoder"].config)
    served = Served(model, "--enforce-eager", max_model_len=64)
    yield served
    served.kill()


def of(response: Any) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    return response.json()


def test_openai_client_gets_embeddings_of_texts_and_token_ids(embedder: Served) -> None:
    client = openai.OpenAI(base_url=embedder.url + "/v1", api_key="none", max_retries=0)
    ids = [[CLS, *ids_of(text), SEP] for text in TEXTS]

    # The client asks for base64 of its own accord, and takes it apart.
    texts = client.embeddings.create(model=NAME, input=TEXTS)
    given = client.embeddings.create(model=NAME, input=ids, encoding_format="float")
    short = client.embeddings.create(model=NAME, input=TEXTS[0], dimensions=8)

    found = np.array([item.embedding for item in texts.data])
    assert [item.index for item in texts.data] == [0, 1, 2]
    assert np.allclose(found, [item.embedding for item in given.data], atol=1e-6)
    assert np.allclose(np.linalg.norm(found, axis=1), 1)
    assert np.allclose(short.data[0].embedding, found[0][:8] / np.linalg.norm(found[0][:8]), atol=1e-5)
    assert texts.usage.prompt_tokens == texts.usage.total_tokens == sum(map(len, ids))
    assert texts.model == NAME


def test_numbers_come_in_the_format_asked_for(embedder: Served) -> None:
    plain = of(embedder.post("/v1/embeddings", input="a cat"))["data"][0]["embedding"]
    packed = of(embedder.post("/v1/embeddings", input="a cat", encoding_format="base64", embed_dtype="float16", endianness="big"))
    raw = of(embedder.post("/v1/embeddings", input="a cat", use_activation=False))["data"][0]["embedding"]
    tokens = of(embedder.post("/pooling", input="a cat", task="token_embed"))["data"][0]
    assert np.allclose(np.frombuffer(base64.b64decode(packed["data"][0]["embedding"]), ">f2"), plain, atol=1e-3)
    assert np.allclose(plain, raw / np.linalg.norm(raw), atol=1e-6)
    assert tokens["object"] == "pooling"
    assert np.shape(tokens["data"]) == (4, 32)


def test_a_conversation_is_rendered_and_embedded(embedder: Served) -> None:
    messages = [{"role": "user", "content": "a cat"}, {"role": "assistant", "content": "ran"}]
    chat = of(embedder.post("/v1/embeddings", messages=messages))
    text = of(embedder.post("/v1/embeddings", input="a cat ran", add_special_tokens=False))
    assert chat["usage"]["prompt_tokens"] == 3
    assert np.allclose(chat["data"][0]["embedding"], text["data"][0]["embedding"], atol=1e-6)


def test_scores_of_an_embedding_model_are_cosines(embedder: Served) -> None:
    one, *others = (np.array(item["embedding"]) for item in of(embedder.post("/v1/embeddings", input=TEXTS))["data"])
    scores = of(embedder.post("/score", text_1=TEXTS[0], text_2=TEXTS[1:]))
    assert np.allclose([item["score"] for item in scores["data"]], [one @ other for other in others], atol=1e-5)


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v1/embeddings", {}, 400, "either input or messages"),
        ("/v1/embeddings", {"input": []}, 400, "input must be text"),
        ("/v1/embeddings", {"input": [[5] * 65]}, 400, "the input has 65 tokens, but this model takes at most 64"),
        ("/v1/embeddings", {"input": [999]}, 400, "outside the vocabulary"),
        ("/v1/embeddings", {"input": "a", "dimensions": 99}, 400, "dimensions=99"),
        ("/v1/embeddings", {"input": "a", "model": "other"}, 404, "other"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "bytes"}, 400, "encoding_format"),
        ("/classify", {"input": "a"}, 400, "does not classify"),
        ("/pooling", {"input": "a", "task": "score"}, 400, "use classify"),
        ("/score", {"text_1": "a", "documents": ["a"]}, 400, "give texts as one of"),
        ("/rerank", {"query": "a", "documents": []}, 400, "documents"),
        ("/rerank", {"query": "a", "documents": ["a"], "instruction": "b"}, 400, "instruction"),
        ("/invocations", {"prompt": "a"}, 400, "input"),
        ("/v1/completions", {"prompt": "a"}, 404, "answers with vectors"),
        ("/v1/chat/completions", {"messages": []}, 404, "answers with vectors"),
    ],
)
def test_what_cannot_be_served_is_an_error_that_says_why(
    embedder: Served, path: str, body: dict[str, Any], status: int, message: str
) -> None:
    response = embedder.post(path, **body)
    assert response.status_code == status, response.text
    assert message in error_of(response)["message"]


def test_documents_are_ranked_as_scores_say(reranker: Served) -> None:
    documents = ["good film", "a cat", "the quick brown fox", "moon"]
    scores = [item["score"] for item in of(reranker.post("/v1/score", queries="a cat", documents=documents))["data"]]
    ranking = of(reranker.post("/v2/rerank", query="a cat", documents=documents, top_n=3))

    best = sorted(range(4), key=lambda i: -scores[i])[:3]
    assert [result["index"] for result in ranking["results"]] == best
    assert [result["document"]["text"] for result in ranking["results"]] == [documents[i] for i in best]
    assert np.allclose([result["relevance_score"] for result in ranking["results"]], [scores[i] for i in best], atol=1e-6)
    assert ranking["usage"]["prompt_tokens"] == sum(2 + 3 + len(text.split()) for text in documents)
    bare = of(reranker.post("/rerank", query="a cat", documents=[{"text": "moon"}], return_documents=False))
    assert set(bare["results"][0]) == {"index", "relevance_score"}


def test_invocations_go_where_their_fields_and_the_model_lead(embedder: Served, reranker: Served) -> None:
    for served, path, body in (
        (embedder, "/v1/embeddings", {"input": "a cat"}),
        (embedder, "/v1/embeddings", {"messages": [{"role": "user", "content": "a cat"}]}),
        (embedder, "/score", {"text_1": "a cat", "text_2": "moon"}),
        (reranker, "/classify", {"input": "a cat"}),
        (reranker, "/rerank", {"query": "a cat", "documents": ["moon"]}),
        (reranker, "/score", {"queries": "a cat", "documents": ["moon"]}),
    ):
        found, expected = of(served.post("/invocations", **body)), of(served.post(path, **body))
        assert {**found, "id": None, "created": None} == {**expected, "id": None, "created": None}


def test_classes_and_metrics(reranker: Served) -> None:
    before = reranker.metric("prompt_tokens_total")
    (found,) = of(reranker.post("/classify", input="a cat"))["data"]
    assert found["label"] == "LABEL_0"
    assert found["num_classes"] == len(found["probs"]) == 1
    assert reranker.metric("prompt_tokens_total") == before + 4
    assert reranker.metric("num_requests_running") == 0


def test_batches_of_embeddings_scores_and_rankings(tmp_path: Path) -> None:
    model = write_pooling_model(tmp_path / "model", CASES["bert"].config)
    bodies = [
        ("/v1/embeddings", {"input": TEXTS}),
        ("/score", {"text_1": "a cat", "text_2": TEXTS}),
        ("/v1/rerank", {"query": "a cat", "documents": TEXTS}),
        ("/v1/embeddings", {"input": ""}),
    ]
    lines = [json.dumps({"custom_id": str(i), "method": "POST", "url": url, "body": body}) for i, (url, body) in enumerate(bodies)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    config = EngineConfig.from_options(model=str(model), max_model_len=64, enforce_eager=True)

    with BatchFiles(str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl")) as files:
        counts = asyncio.run(run_batch(config, ServerConfig(), files, max_inflight=None, progress=False))

    answers = {item["custom_id"]: item for item in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())}
    assert (counts.succeeded, counts.failed) == (4, 0)
    assert [len(answers[str(i)]["response"]["body"]["data"]) for i in (0, 1)] == [3, 3]
    assert len(answers["2"]["response"]["body"]["results"]) == 3
