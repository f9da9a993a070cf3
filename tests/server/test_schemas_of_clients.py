"""Whole responses and every event are what the official clients' own types describe, checked strictly as the clients do not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic.types
import openai.types.responses
import pytest
from pydantic import TypeAdapter
from starlette.testclient import TestClient

from tests.checkpoints import script_ids
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import HELLO
from tests.server.templates import CALL, PARSED, SEARCH, showing_tokenizer

EVERYTHING = f"<think>hm</think>Let me see.{CALL}{CALL}"
OPENAI_EVENT: TypeAdapter[Any] = TypeAdapter(openai.types.responses.ResponseStreamEvent)
ANTHROPIC_EVENT: TypeAdapter[Any] = TypeAdapter(anthropic.types.RawMessageStreamEvent)


@pytest.fixture
def client(tmp_path: Path, engine: FakeEngine, make_client: Callable[..., TestClient]) -> TestClient:
    engine.tokenizer = showing_tokenizer(tmp_path)
    return make_client(**PARSED)


def data_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]


@pytest.mark.parametrize("script", ["", "Hello", EVERYTHING])
@pytest.mark.parametrize("more", [{}, {"max_output_tokens": 12}, {"metadata": {"a": "b"}, "instructions": "x", "truncation": "auto"}])
def test_responses(client: TestClient, engine: FakeEngine, script: str, more: dict[str, Any]):
    engine.script = script_ids(script)
    body = {"input": "hi", "tools": [{"type": "function", "name": "search", "parameters": SEARCH, "strict": False}], **more}

    whole = client.post("/v1/responses", json=body).json()
    stream = client.post("/v1/responses", json={**body, "stream": True}).text

    openai.types.responses.Response.model_validate(whole)
    for event in data_of(stream):
        parsed = OPENAI_EVENT.validate_python(event)
        assert parsed.type == event["type"]


def test_logprobs_of_responses(engine: FakeEngine, make_client: Callable[..., TestClient]):
    body = {"input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    client = make_client()

    openai.types.responses.Response.model_validate(client.post("/v1/responses", json=body).json())
    for event in data_of(client.post("/v1/responses", json={**body, "stream": True}).text):
        OPENAI_EVENT.validate_python(event)


@pytest.mark.parametrize("script", ["", "Hello", EVERYTHING])
@pytest.mark.parametrize("max_tokens", [12, 300])
def test_messages(client: TestClient, engine: FakeEngine, script: str, max_tokens: int):
    engine.script = script_ids(script)
    body = {"messages": HELLO, "max_tokens": max_tokens, "tools": [{"name": "search", "input_schema": SEARCH}]}

    whole = client.post("/v1/messages", json=body).json()
    stream = client.post("/v1/messages", json={**body, "stream": True}).text

    anthropic.types.Message.model_validate(whole)
    for event in data_of(stream):
        if event["type"] != "ping":
            ANTHROPIC_EVENT.validate_python(event)
