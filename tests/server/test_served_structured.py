"""Structured outputs over HTTP, through a real server over a model that would say something else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from tests.checkpoints import write_scripted_model
from tests.server.helpers import HELLO, choices, error_of
from tests.server.served import NAME, Served

pytestmark = pytest.mark.heavy

CONTEXT = 1024
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "array", "items": {"type": "integer"}, "maxItems": 2}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model: Path = write_scripted_model(tmp_path_factory.mktemp("scripted"), "Let me tell you something else. " * 30, max_positions=CONTEXT)
    server = Served(model, "--enforce-eager", max_model_len=CONTEXT)
    yield server
    server.kill()


@pytest.fixture(scope="module")
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.url + "/v1", api_key="x", max_retries=0)


def test_response_format_is_kept_to_streamed_and_not(client: openai.OpenAI):
    asked = {"model": NAME, "messages": HELLO, "response_format": JSON_SCHEMA, "temperature": 0, "max_tokens": 300}
    whole = client.chat.completions.create(**asked)
    jsonschema.validate(json.loads(whole.choices[0].message.content or ""), SCHEMA)
    assert whole.choices[0].finish_reason == "stop"
    stream = client.chat.completions.create(
        model=NAME, messages=HELLO, response_format=JSON_SCHEMA, temperature=0, max_tokens=300, stream=True
    )
    parts = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(parts) == whole.choices[0].message.content
    assert len(parts) > 5
    loose = client.chat.completions.create(model=NAME, messages=HELLO, response_format={"type": "json_object"}, max_tokens=300, seed=3)
    assert (loose.choices[0].message.content or "").startswith("{")


def test_several_outputs_of_a_completion_fit(client: openai.OpenAI):
    done = client.completions.create(
        model=NAME, prompt=["a", "b"], n=2, max_tokens=40, temperature=1.0, logprobs=1,
        extra_body={"structured_outputs": {"regex": r"[a-f]{3}\.[0-9]{2}"}},
    )  # fmt: skip
    assert [bool(re.fullmatch(r"[a-f]{3}\.[0-9]{2}", choice.text)) for choice in done.choices] == [True] * 4
    said = client.completions.create(model=NAME, prompt="a", temperature=0, extra_body={"structured_outputs": {"choice": ["yes", "no"]}})
    assert said.choices[0].text in ("yes", "no")


TOOLS = [
    {"type": "function", "function": {"name": "plan", "parameters": SCHEMA, "strict": True}},
    {"type": "function", "function": {"name": "wait", "description": 'Says "{wait}" <tool_call>'}},
]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "plan"}}])
def test_calls_that_must_come_do_whatever_the_model_would_say(client: openai.OpenAI, choice: Any):
    asked: dict[str, Any] = {"model": NAME, "messages": HELLO, "tools": TOOLS, "tool_choice": choice, "temperature": 1, "max_tokens": 400}
    for seed in range(3):
        whole = client.chat.completions.create(**asked, seed=seed, parallel_tool_calls=False).choices[0]
        (call,) = whole.message.tool_calls or []
        if call.function.name == "plan":
            jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
        else:
            assert (call.function.name, call.function.arguments, choice) == ("wait", "{}", "required")
        assert whole.finish_reason == ("tool_calls" if choice == "required" else "stop")
        deltas = [
            part.choices[0].delta.tool_calls or []
            for part in client.chat.completions.create(**asked, seed=seed, parallel_tool_calls=False, stream=True)
        ]
        parts = [delta.function.arguments or "" for calls in deltas for delta in calls]
        assert "".join(parts) == call.function.arguments


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 5}}}}, "response_format"),
        ({"response_format": {"type": "structural_tag", "format": {"type": "what"}}}, "response_format"),
        ({"structured_outputs": {"json": "not json"}}, "structured_outputs"),
        ({"structured_outputs": {"json": {"$ref": "#/definitions/nothing"}}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": 'rout::="x"'}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": 'root := "x"'}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "start: " + "(" * 3000}}, "structured_outputs"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_cannot_be_kept_to_is_400_while_others_run_on(served: Served, body: dict, param: str):
    chat = {"model": NAME, "messages": HELLO, "max_tokens": 60}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(served.post, "/v1/chat/completions", **chat, temperature=0, ignore_eos=True)
        for stream in (False, True):
            response = served.post("/v1/chat/completions", **chat, **body, stream=stream)
            assert response.status_code == 400, response.text
            assert error_of(response)["param"] == param
            assert param in error_of(response)["message"]
    assert running.result().json()["usage"]["completion_tokens"] == 60
    assert served.post("/v1/completions", model=NAME, prompt="a", max_tokens=2).status_code == 200


def test_only_the_answer_behind_reasoning_is_constrained(tmp_path_factory: pytest.TempPathFactory):
    opened = "{{ messages[0].content }}: <think>"
    script = "so, what to say?</think>whatever I like" + " and more" * 60
    model = write_scripted_model(tmp_path_factory.mktemp("thinks"), script, start=len("hi: <think>"), max_positions=CONTEXT)
    server = Served(model, "--enforce-eager", "--reasoning-parser", "qwen3", "--trust-request-chat-template", max_model_len=CONTEXT)
    try:
        asked = {"model": NAME, "messages": HELLO, "temperature": 0, "max_tokens": 200, "structured_outputs": {"choice": ["yes", "no"]}}
        reasoned = server.post("/v1/chat/completions", **asked, chat_template=opened).json()["choices"][0]
        assert reasoned["message"]["reasoning"] == "so, what to say?"
        assert reasoned["message"]["content"] in ("yes", "no")
        closed = server.post("/v1/chat/completions", **asked, chat_template=opened + "</think>").json()["choices"][0]
        assert closed["message"]["content"] in ("yes", "no")
        assert not closed["message"]["reasoning"]
        for stream in (False, True):
            limited = server.post(
                "/v1/chat/completions",
                **{**asked, "structured_outputs": None},
                chat_template=opened,
                thinking_token_budget=5,
                stream=stream,
            )
            if stream:
                assert "".join(part["delta"].get("reasoning") or "" for part in choices(limited.text)) == "so, w"
            else:
                assert limited.json()["choices"][0]["message"]["reasoning"] == "so, w"
                # The mark that ends it counts.
                assert limited.json()["usage"]["completion_tokens_details"]["reasoning_tokens"] == 5 + len("</think>")
        # What had to end gives way to what was asked for.
        both = server.post("/v1/chat/completions", **asked, chat_template=opened, thinking_token_budget=0).json()["choices"][0]
        assert both["message"]["content"] in ("yes", "no")
    finally:
        server.kill()
