"""No client input may be a server error, whatever it is."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from jaxllm.server.app import create_app
from jaxllm.server.messages_api.protocol import MessagesRequest
from jaxllm.server.protocol import REFUSED_FIELDS, ChatCompletionRequest, CompletionRequest, TokenizeRequest
from jaxllm.server.responses_api.protocol import ResponsesRequest
from jaxllm.server.routes.chat import ChatBatchRequest
from jaxllm.server.routes.generate import _FIELDS as SAMPLING_FIELDS
from jaxllm.server.routes.generate import GenerateRequest
from jaxllm.text.tokenizer import Tokenizer
from tests.server.conftest import serving_state
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import HELLO, chunks, error_of

scalars = st.none() | st.booleans() | st.integers() | st.sampled_from([-1, 0, 1, 2, 5, 2**31, 2**63, 2**64, -(2**63) - 1, 10**30])
scalars = scalars | st.floats(allow_nan=False, allow_infinity=False) | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=3), max_leaves=6)
roles = st.sampled_from(["user", "assistant", "system", "tool", "developer", "critic"])
part_types = st.sampled_from(["text", "image_url", "refusal", "x"])
parts = st.fixed_dictionaries({"type": part_types | values}, optional={"text": values, "refusal": values})
calls = st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": texts | values}, optional={"arguments": values})})
contents = texts | st.lists(parts | values, max_size=3) | values
messages = st.fixed_dictionaries(
    {"role": roles | values}, optional={"content": contents, "tool_calls": st.lists(calls | values, max_size=2) | values, "name": values}
)
variables = texts | st.sampled_from(["messages", "tools", "self", "tokenize", "bos_token", "loop"])

FIELDS = {
    "/v1/completions": sorted({*CompletionRequest.model_fields, *REFUSED_FIELDS}),
    "/v1/chat/completions": sorted({*ChatCompletionRequest.model_fields, *REFUSED_FIELDS}),
    "/tokenize": sorted(TokenizeRequest.model_fields),
    "/detokenize": ["tokens", "model"],
    "/v1/responses": sorted({*ResponsesRequest.model_fields, *ChatCompletionRequest.model_fields}),
    "/v1/messages": sorted({*MessagesRequest.model_fields, *ChatCompletionRequest.model_fields}),
    "/v1/chat/completions/batch": sorted({*ChatBatchRequest.model_fields, *ChatCompletionRequest.model_fields}),
    "/inference/v1/generate": sorted(GenerateRequest.model_fields),
}
BASES = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": HELLO},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [100]},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 5},
    "/v1/chat/completions/batch": {"messages": [HELLO]},
    "/inference/v1/generate": {"token_ids": [100]},
}


@pytest.fixture(scope="module")
def shared(tokenizer: Tokenizer) -> TestClient:
    return TestClient(create_app(serving_state(FakeEngine(tokenizer), trust_request_chat_template=True)), raise_server_exceptions=False)


def check(client: TestClient, path: str, body: object) -> None:
    response = client.post(path, json=body)
    assert response.status_code in (200, 400, 404), (body, response.text)
    if response.status_code != 200:
        assert response.json()["type"] == "error" if path.startswith("/v1/messages") else error_of(response)
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert not {"event: error", "event: response.failed"} & {*response.text.splitlines()}, (body, response.text)
        if "event: " not in response.text:
            assert "error" not in chunks(response.text)[-1], (body, response.text)


@pytest.mark.parametrize("path", FIELDS)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_values_of_known_fields(shared: TestClient, path: str, data: st.DataObject):
    fields = data.draw(st.dictionaries(st.sampled_from(FIELDS[path]), values, max_size=3))

    check(shared, path, {**BASES[path], **fields})


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=st.lists(messages | values, max_size=3), kwargs=st.dictionaries(variables, values, max_size=2))
def test_any_conversation(shared: TestClient, messages: list[object], kwargs: dict[str, object]):
    check(shared, "/v1/chat/completions", {"messages": messages, "chat_template_kwargs": kwargs})


schema_words = st.sampled_from(
    ["type", "properties", "required", "items", "enum", "const", "anyOf", "$ref", "$defs", "pattern", "additionalProperties", "description"]
)
schema_values = values | st.sampled_from(["object", "string", "integer", "array", ["string", "null"], "#/$defs/a", "#"])
inner_schemas = st.recursive(
    st.dictionaries(schema_words, schema_values, max_size=3),
    lambda inner: st.fixed_dictionaries({"type": st.just("object"), "properties": st.dictionaries(texts, inner, max_size=3)}),
    max_leaves=4,
)
functions = st.fixed_dictionaries(
    {"name": st.sampled_from(["f", "g", "no name", '"', "</tool_call>"]) | texts},
    optional={"parameters": inner_schemas | values, "strict": st.booleans() | values, "description": texts},
)
F = {"type": "function", "function": {"name": "f"}}
tool_choices = st.sampled_from(["auto", "required", "none", F, {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [F]}}])


@pytest.mark.parametrize("parser", ["hermes", "qwen3_coder", "pythonic", "gemma4", "openai", "llama3_json"])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(functions=st.lists(functions, min_size=1, max_size=3), choice=tool_choices | values, several=st.none() | st.booleans())
def test_any_tools(tokenizer: Tokenizer, parser: str, functions: list[object], choice: object, several: bool | None):
    state = serving_state(FakeEngine(tokenizer), enable_auto_tool_choice=True, tool_call_parser=parser)
    client = TestClient(create_app(state), raise_server_exceptions=False)
    tools = [{"type": "function", "function": function} for function in functions]
    body = {"messages": HELLO, "tools": tools, "tool_choice": choice, "parallel_tool_calls": several, "max_tokens": 2}
    check(client, "/v1/chat/completions", body)


item_types = st.sampled_from(
    ["message", "function_call", "function_call_output", "reasoning", "tool_use", "tool_result", "thinking", "text"]
)
item_fields = ["content", "output", "call_id", "name", "arguments", "summary", "id", "input", "tool_use_id", "thinking", "text"]
items = st.builds(
    lambda kind, role, fields: {"type": kind, "role": role, **fields},
    item_types | values,
    roles | values,
    st.dictionaries(st.sampled_from(item_fields), contents | st.just("{}"), max_size=6),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(items=st.lists(items | values, max_size=4), role=roles)
def test_any_items_and_blocks(shared: TestClient, items: list[object], role: str):
    check(shared, "/v1/responses", {"input": items, "truncation": "auto"})
    check(shared, "/v1/messages", {"messages": [{"role": role, "content": items}], "system": items[:1], "max_tokens": 5})
    check(shared, "/v1/messages/count_tokens", {"messages": items})


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(params=st.dictionaries(st.sampled_from(SAMPLING_FIELDS), values, max_size=3))
def test_any_sampling_parameters(shared: TestClient, params: dict[str, object]):
    check(shared, "/inference/v1/generate", {"token_ids": [100], "sampling_params": params})


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=values)
def test_any_body(shared: TestClient, body: object):
    for path in FIELDS:
        check(shared, path, body)
