"""No input of a client of a pooling model may be a server error, whatever it is."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from jaxllm.core_types import EngineOutput, FinishReason, Pooled, PoolingInfo
from jaxllm.engine.front import Front
from jaxllm.engine.generation_config import GenerationDefaults
from jaxllm.engine.metrics import EngineMetrics
from jaxllm.outputs import PoolingRequestOutput
from jaxllm.pooling_params import PoolingParams
from jaxllm.server.app import create_app
from jaxllm.server.pooling_api.protocol import ClassifyRequest, EmbeddingRequest, PoolRequest, RerankRequest, ScoreRequest
from jaxllm.text.tokenizer import Tokenizer
from tests.server.conftest import serving_state
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import error_of
from tests.server.test_any_input import check, values

WIDTH = 4
INFO = {
    "embedder": PoolingInfo(tasks=["embed", "token_embed"], width=WIDTH, matryoshka=True),
    "cross-encoder": PoolingInfo(tasks=["classify", "token_classify"], width=1, labels=["yes"], pairs=True),
}
MODELS = {
    "/v1/embeddings": (EmbeddingRequest, {"input": "a"}),
    "/pooling": (PoolRequest, {"input": [[65, 66], [67]]}),
    "/classify": (ClassifyRequest, {"input": ["a", "b"]}),
    "/score": (ScoreRequest, {"text_1": "a", "text_2": ["b", "c"]}),
    "/rerank": (RerankRequest, {"query": "a", "documents": ["b", "c"]}),
}


class FakePooler(FakeEngine):
    """Answers every checked request with ones."""

    def __init__(self, tokenizer: Tokenizer, pooling: PoolingInfo):
        super().__init__(tokenizer)
        self.info = msgspec.structs.replace(self.info, pooling=pooling)
        self._front = Front(self.config, tokenizer, GenerationDefaults({}, [0]), self.info, EngineMetrics(self.info, model_name="m"))

    async def encode(self, prompt: Any, params: PoolingParams, request_id: str, **more: Any) -> AsyncGenerator[PoolingRequestOutput, None]:
        request = self._front.pooling.process(request_id, prompt, params, **more)
        state = self._front.open(request)
        task = request.pooling_params.task
        shape = (self.info.pooling.width,) if not task.startswith("token") else (len(request.prompt_token_ids), self.info.pooling.width)
        pooled = Pooled.of(np.ones(shape))
        self._front.output.process([EngineOutput(request_id=request_id, finish_reason=FinishReason.STOP, pooled=pooled)])
        yield state.take()


@pytest.fixture(scope="module")
def clients(tokenizer: Tokenizer) -> dict[str, TestClient]:
    states = {name: serving_state(FakePooler(tokenizer, info), trust_request_chat_template=True) for name, info in INFO.items()}
    return {name: TestClient(create_app(state), raise_server_exceptions=False) for name, state in states.items()}


@pytest.mark.parametrize("path", MODELS)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_values_of_known_fields(clients: dict[str, TestClient], path: str, data: st.DataObject) -> None:
    model, base = MODELS[path]
    fields = data.draw(st.dictionaries(st.sampled_from(sorted(model.model_fields)), values, max_size=3))

    check(clients[data.draw(st.sampled_from(sorted(clients)))], path, {**base, **fields})


def test_the_bases_are_served(clients: dict[str, TestClient]) -> None:
    served = {(name, path) for name, client in clients.items() for path in MODELS if client.post(path, json=MODELS[path][1]).is_success}
    every = {(name, path) for name in clients for path in MODELS}
    assert every - served == {("embedder", "/classify"), ("cross-encoder", "/v1/embeddings")}


@pytest.mark.parametrize(
    ("path", "body"),
    [("/score", {"text_1": "a", "text_2": ["b"] * 20_000}), ("/score", {"text_1": ["b"] * 20_000, "text_2": ["b"] * 20_000}),
     ("/rerank", {"query": "a", "documents": ["b"] * 20_000})],
)  # fmt: skip
def test_too_many_texts_are_refused_before_they_cost_anything(clients: dict[str, TestClient], path: str, body: dict[str, Any]) -> None:
    for client in clients.values():
        error = error_of(client.post(path, json=body))
        assert error["param"] == ("documents" if path == "/rerank" else "text_2")
        assert "20000" in error["message"]
