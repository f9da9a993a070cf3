"""Validate what the server answers against OpenAI's own OpenAPI document.

    python scripts/check_openai_schemas.py PATH_TO_OPENAPI

The document (openapi.json or openapi.yaml of github.com/openai/openai-openapi) is not part of this repository. Every kind of body and
stream event of the endpoints that OpenAI has too is made by the application over an engine that says what it is told, and embeddings by a
served model. Exits with 1 where one does not fit.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from starlette.testclient import TestClient

from jaxllm.server.app import create_app
from tests.checkpoints import script_ids
from tests.golden.pooling_cases import CASES
from tests.pooling_models import write_pooling_model
from tests.server.conftest import serving_state
from tests.server.fake_engine import FakeEngine, load_test_tokenizer
from tests.server.served import Served

SCHEMA = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
TOOL = {"type": "function", "function": {"name": "search", "description": "Search", "parameters": SCHEMA}}
FLAT_TOOL = {"type": "function", "name": "search", "description": "Search", "parameters": SCHEMA, "strict": False}
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "x"}}\n</tool_call>'
THINKING = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}\n<think>\n{% endif %}"
HELLO = [{"role": "user", "content": "hi"}]

# Path, what the model says, request.
CHAT: list[tuple[str, dict[str, Any]]] = [
    ("I see.\n</think>\n\nYes", {}),
    ("I see.\n</think>\n\nYes", {"n": 2, "temperature": 1.0, "logprobs": True, "top_logprobs": 2}),
    ("I see.\n</think>\n\nYes", {"max_tokens": 12}),
    (f"I see.\n</think>\n\nLet me look.{CALL}{CALL}", {"tools": [TOOL]}),
    ("I see.\n</think>\n\nYes", {"stop": ["Ye"], "seed": 3, "user": "u", "response_format": {"type": "text"}}),
]
COMPLETIONS: list[tuple[str, dict[str, Any]]] = [
    ("Hello", {"prompt": "a"}),
    ("Hello", {"prompt": ["a", "b"], "n": 2, "temperature": 1.0, "logprobs": 2}),
    # Log-probabilities of an echoed prompt begin with null, which the schema has forgotten.
    ("Hello", {"prompt": "a", "echo": True}),
    ("Hello", {"prompt": [70, 71], "max_tokens": 2}),
]
RESPONSES: list[tuple[str, dict[str, Any]]] = [
    ("I see.\n</think>\n\nYes", {"input": "hi", "metadata": {"a": "b"}, "instructions": "Be kind.", "reasoning": {"effort": "low"}}),
    (f"I see.\n</think>\n\nLet me look.{CALL}", {"input": [{"role": "user", "content": "hi"}], "tools": [FLAT_TOOL]}),
    ("I see.\n</think>\n\nYes", {"input": "hi", "max_output_tokens": 12}),
]

# Where the document's schemas are narrower than its own text or than what clients of vLLM know: (schema, end of the path, why).
KNOWN = (
    ("CreateCompletionResponse", "usage", "null in all chunks but the last one, as the text of stream_options has it"),
    ("CreateCompletionResponse", "finish_reason", "null in all chunks but a choice's last one"),
    ("ResponseStreamEvent", "response/usage", "null before the response has ended, as the text's examples have it"),
    ("ErrorResponse", "error/code", "the status as a number, as vLLM gives it"),
)


class Checker:
    """Validates values against the document's schemas and prints what does not fit."""

    def __init__(self, path: Path):
        text = path.read_text()
        self.document = _dialect(json.loads(text) if path.suffix == ".json" else yaml.safe_load(text))
        self.count = self.failures = 0

    def check(self, what: str, value: Any, name: str) -> None:
        self.count += 1
        schema = {"$ref": f"#/components/schemas/{self._branch(name, value)}", "components": self.document["components"]}
        errors = jsonschema.Draft202012Validator(schema).iter_errors(value)
        ends = tuple(end for other, end, _ in KNOWN if other == name)
        error = jsonschema.exceptions.best_match(e for e in errors if not "/".join(map(str, e.absolute_path)).endswith(ends or ("\0",)))
        if error is not None:
            self.failures += 1
            where = "/".join(map(str, error.absolute_path)) or "the value"
            print(f"{what} is no {name}: {where}: {error.message[:300]}\n    {json.dumps(value)[:300]}")

    def _branch(self, name: str, value: Any) -> str:
        """Of a schema that is one of several, the one for the value's type: its errors say more."""
        schemas = self.document["components"]["schemas"]
        for branch in schemas[name].get("anyOf", ()):
            other = branch.get("$ref", "").rpartition("/")[2]
            types = schemas.get(other, {}).get("properties", {}).get("type", {})
            if isinstance(value, dict) and value.get("type") in types.get("enum", [types.get("const")]):
                return other
        return name


def _dialect(schema: Any) -> Any:
    """JSON Schema for the document's older words: `nullable`; and `oneOf`, whose branches overlap there, as `anyOf`."""
    if isinstance(schema, list):
        return [_dialect(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    out = {("anyOf" if key == "oneOf" and isinstance(value, list) else key): _dialect(value) for key, value in schema.items()}
    return {"anyOf": [out, {"type": "null"}]} if out.pop("nullable", None) is True else out


def _events(body: str) -> Iterator[Any]:
    for line in body.splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    checker = Checker(Path(sys.argv[1]))
    engine = FakeEngine(load_test_tokenizer(Path(tempfile.mkdtemp()), chat_template=THINKING))
    state = serving_state(engine, enable_auto_tool_choice=True, tool_call_parser="hermes", reasoning_parser="qwen3")
    client = TestClient(create_app(state), raise_server_exceptions=False)

    def post(path: str, said: str, **body: Any) -> str:
        engine.script = script_ids(said)
        response = client.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.text

    checker.check("/v1/models", client.get("/v1/models").json(), "ListModelsResponse")
    for kind, path, cases, whole, event in (
        ("chat", "/v1/chat/completions", CHAT, "CreateChatCompletionResponse", "CreateChatCompletionStreamResponse"),
        ("completions", "/v1/completions", COMPLETIONS, "CreateCompletionResponse", "CreateCompletionResponse"),
        ("responses", "/v1/responses", RESPONSES, "Response", "ResponseStreamEvent"),
    ):
        for said, body in cases:
            given = {"messages": HELLO, **body} if kind == "chat" else body
            answer = json.loads(post(path, said, **given))
            checker.check(path, answer, whole)
            if kind == "responses":
                checker.check("a stored response", client.get(f"/v1/responses/{answer['id']}").json(), whole)
            options = {"stream_options": {"include_usage": True}} if kind != "responses" else {}
            for chunk in _events(post(path, said, **given, stream=True, **options)):
                checker.check(f"an event of {path}", chunk, event)
    for path, body in (("/v1/chat/completions", {}), ("/v1/completions", {"prompt": 1}), ("/v1/responses", {"model": "none"})):
        checker.check(f"an error of {path}", client.post(path, json=body).json(), "ErrorResponse")
    with tempfile.TemporaryDirectory() as folder:
        server = Served(write_pooling_model(Path(folder), CASES["bert"].config), max_model_len=64)
        try:
            for options in ({}, {"encoding_format": "float", "dimensions": None}):
                checker.check(
                    "/v1/embeddings", server.post("/v1/embeddings", input=["a", "dog"], **options).json(), "CreateEmbeddingResponse"
                )
        finally:
            server.kill()
    print(f"{checker.count} bodies and events, {checker.failures} of which do not fit")
    return 1 if checker.failures else 0


if __name__ == "__main__":
    sys.exit(main())
