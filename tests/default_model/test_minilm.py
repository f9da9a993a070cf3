"""all-MiniLM-L6-v2, an encoder that people use, against what sentence-transformers gave; and served to the openai client."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import openai
import pytest

from jaxllm import LLM, PoolingParams
from tests.server.served import NAME, Served

pytestmark = [pytest.mark.heavy, pytest.mark.default_model]

GOLDEN = Path(__file__).parents[1] / "golden" / "minilm.npz"
MAX_DELTA = 1e-5


def test_embeddings_equal_sentence_transformers(minilm_directory: Path) -> None:
    with np.load(GOLDEN) as golden:
        texts, expected = golden["texts"].tolist(), golden["embeddings"]

    with LLM(str(minilm_directory), dtype="float32") as llm:
        assert llm.info.max_model_len == 256
        outputs = llm.embed(texts, pooling_params=PoolingParams(truncate_prompt_tokens=-1), use_tqdm=False)

    assert max(len(output.prompt_token_ids) for output in outputs) == 256
    assert np.abs(np.array([output.outputs.embedding for output in outputs]) - expected).max() < MAX_DELTA


def test_the_openai_client_gets_them_from_a_server(minilm_directory: Path) -> None:
    with np.load(GOLDEN) as golden:
        texts, expected = golden["texts"].tolist(), golden["embeddings"]
    served = Served(minilm_directory, "--enforce-eager", "--dtype", "float32", max_model_len=256)
    try:
        client = openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0)
        answer = client.embeddings.create(model=NAME, input=texts, extra_body={"truncate_prompt_tokens": -1})
    finally:
        served.kill()
    assert np.abs(np.array([item.embedding for item in answer.data]) - expected).max() < MAX_DELTA
