"""Tool calls and reasoning as clients get them: in messages and in streams, with ids, reasons and counts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest
from starlette.testclient import TestClient

from jaxllm.errors import ConfigError
from jaxllm.server.app import create_app
from jaxllm.server.config import ServerConfig
from jaxllm.server.parsers import REASONING_FORMATS
from tests.checkpoints import script_ids
from tests.server.conftest import LiveServer, serving_state
from tests.server.fake_engine import FakeEngine, load_test_tokenizer
from tests.server.helpers import HELLO, choices, error_of
from tests.server.parsers.examples import ALL, REASONING_EXAMPLES, TOOL_EXAMPLES, tool

CALLING = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "x"}}\n</tool_call>'
# The prompt of each ends as the models' own templates end it.
THINKING = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}\n<think>\n{% endif %}"


@dataclass
class Streamed:
    """A streamed message put together as the official client hands it out."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, choice: Any) -> None:
        delta = choice.delta
        self.content += delta.content or ""
        self.reasoning += getattr(delta, "reasoning", None) or ""
        for call in delta.tool_calls or ():
            if call.id is not None:
                assert call.index == len(self.calls)
                assert call.type == "function"
                self.calls.append({"id": call.id, "name": call.function.name, "arguments": ""})
            self.calls[call.index]["arguments"] += call.function.arguments or ""
        self.finish_reason = choice.finish_reason or self.finish_reason


@pytest.fixture
def thinking_engine(tmp_path: Path) -> FakeEngine:
    return FakeEngine(load_test_tokenizer(tmp_path, chat_template=THINKING), "I see.\n</think>\n\nYes")


def client_of(engine: FakeEngine, **options: Any) -> TestClient:
    return TestClient(create_app(serving_state(engine, **options)), raise_server_exceptions=False)


def chat(client: TestClient, **body: Any) -> dict[str, Any]:
    response = client.post("/v1/chat/completions", json={"messages": HELLO, **body})
    assert response.status_code == 200, response.text
    return response.json()


def stream(client: TestClient, **body: Any) -> list[dict[str, Any]]:
    return choices(client.post("/v1/chat/completions", json={"messages": HELLO, "stream": True, **body}).text)


@pytest.mark.parametrize("name", sorted(TOOL_EXAMPLES))
def test_the_official_client_gets_the_calls_of_every_format(engine: FakeEngine, name: str):
    reasoning = "openai_gptoss" if name == "openai" else None
    with (
        LiveServer(serving_state(engine, enable_auto_tool_choice=True, tool_call_parser=name, reasoning_parser=reasoning)) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        for example in TOOL_EXAMPLES[name]:
            engine.script = script_ids(example.output)
            tools = example.tools or [{"type": "function", "function": {"name": call[0]}} for call in example.calls] or ALL
            asked: dict[str, Any] = {"model": "scripted", "messages": HELLO, "tools": tools}
            whole = client.chat.completions.create(**asked).choices[0]
            streamed = Streamed()
            for part in client.chat.completions.create(**asked, stream=True):
                streamed.add(part.choices[0])

            calls = whole.message.tool_calls or []
            assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [call[:2] for call in example.calls]
            assert (whole.message.content or "") == streamed.content == example.content
            assert (getattr(whole.message, "reasoning", None) or "") == streamed.reasoning == example.reasoning
            assert [(call["name"], call["arguments"]) for call in streamed.calls] == [
                (call.function.name, call.function.arguments) for call in calls
            ]
            assert whole.finish_reason == streamed.finish_reason == ("tool_calls" if calls else "stop")
            assert len({call.id for call in calls} | {call["id"] for call in streamed.calls} | {""}) >= len(calls) + 1


@pytest.mark.parametrize("name", sorted(REASONING_EXAMPLES))
def test_the_official_client_gets_the_reasoning_of_every_format(engine: FakeEngine, name: str):
    form = REASONING_FORMATS[name]
    with (
        LiveServer(serving_state(engine, reasoning_parser=name, trust_request_chat_template=True)) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        for example in REASONING_EXAMPLES[name]:
            engine.script = script_ids(example.output)
            # Where the output does not open its reasoning, the prompt did.
            opened = form.starts[0] if form.implied and example.reasoning and not example.output.lstrip().startswith(form.starts) else ""
            asked: dict[str, Any] = {"model": "scripted", "messages": HELLO, "extra_body": {"chat_template": "{{ 'Go ' }}" + opened}}
            whole = client.chat.completions.create(**asked)
            streamed = Streamed()
            for part in client.chat.completions.create(**asked, stream=True):
                streamed.add(part.choices[0])

            message = whole.choices[0].message
            assert (message.content or "") == streamed.content == example.content
            assert (getattr(message, "reasoning", None) or "") == streamed.reasoning == example.reasoning
            assert whole.usage.completion_tokens_details.reasoning_tokens >= len(example.reasoning.split())


def test_text_streams_token_by_token_while_tools_are_there(engine: FakeEngine):
    parts = stream(client_of(engine, **CALLING), tools=ALL)

    assert [part["delta"].get("content") for part in parts] == ["", *"Hello", " w", *"orld", None]


def test_a_limit_stays_a_limit(engine: FakeEngine):
    engine.script = script_ids(CALL)
    choice = chat(client_of(engine, **CALLING), tools=ALL, max_tokens=60)["choices"][0]

    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "search", "arguments": '{"query": "x"}'}


def test_only_the_first_call_stays_without_parallel_calls(engine: FakeEngine):
    engine.script = script_ids(CALL + CALL)
    client = client_of(engine, **CALLING)

    assert len(chat(client, tools=ALL)["choices"][0]["message"]["tool_calls"]) == 2
    assert len(chat(client, tools=ALL, parallel_tool_calls=False)["choices"][0]["message"]["tool_calls"]) == 1
    indices = {
        call["index"] for part in stream(client, tools=ALL, parallel_tool_calls=False) for call in part["delta"].get("tool_calls", ())
    }
    assert indices == {0}


def test_each_sequence_has_its_own_calls(engine: FakeEngine):
    order: dict[str, int] = {}
    engine.scripts = lambda request: script_ids((CALL, "No.")[order.setdefault(request.request_id, len(order)) % 2])
    client = client_of(engine, **CALLING)
    body = {"messages": HELLO, "tools": ALL, "n": 2, "temperature": 1}

    whole = client.post("/v1/chat/completions", json=body).json()["choices"]
    assert [choice["finish_reason"] for choice in whole] == ["tool_calls", "stop"]
    assert [choice["message"]["content"] for choice in whole] == [None, "No."]
    text = client.post("/v1/chat/completions", json={**body, "stream": True}).text
    assert [choices(text, index)[-1]["finish_reason"] for index in (0, 1)] == ["tool_calls", "stop"]


def test_ids_are_new_in_the_conversation(engine: FakeEngine):
    engine.script = script_ids(
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
    )
    client = client_of(engine, enable_auto_tool_choice=True, tool_call_parser="kimi_k2")
    first = chat(client, tools=ALL)["choices"][0]["message"]["tool_calls"][0]
    history = [*HELLO, {"role": "assistant", "tool_calls": [first]}, {"role": "tool", "tool_call_id": first["id"], "content": "noon"}]
    second = chat(client, tools=ALL, messages=history)["choices"][0]["message"]["tool_calls"][0]

    assert first["id"] == "functions.now:0"
    assert second["id"] != first["id"]


def test_mistral_gets_ids_that_its_templates_accept(engine: FakeEngine):
    engine.script = script_ids("[TOOL_CALLS]now[ARGS]{}")
    call = chat(client_of(engine, enable_auto_tool_choice=True, tool_call_parser="mistral"), tools=ALL)["choices"][0]["message"][
        "tool_calls"
    ][0]

    assert len(call["id"]) == 9
    assert call["id"].isalnum()


def test_tool_choice_none_leaves_text_alone(engine: FakeEngine):
    engine.script = script_ids(CALL)
    choice = chat(client_of(engine, **CALLING), tools=ALL, tool_choice="none")["choices"][0]

    assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")
    assert "tool_calls" not in choice["message"]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"tools": ALL, "tool_choice": "perhaps"}, "tool_choice must be"),
        ({"tools": ALL, "tool_choice": {"type": "function", "function": {"name": "later"}}}, "names the function 'later'"),
        ({"tools": ALL, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}}, "tool_choice must be"),
        ({"tool_choice": "required"}, "needs tools"),
        ({"tools": [tool("f", a={"type": "nonsense"})], "tool_choice": "required"}, "tools"),
        ({"tools": [tool("f", a={"type": 5})], "tool_choice": "required"}, "tools"),
        *[
            ({"tools": [tool("f", a=part)], "tool_choice": "required"}, "tools")
            for part in ({"type": [["string"]]}, {"anyOf": 1}, {"oneOf": ["a"]}, {"enum": "a"}, {"properties": [1]}, {"$defs": True})
        ],
        ({"tools": [{"type": "function"}]}, "tools[0] must be"),
        ({"tools": [{"type": "web_search"}]}, "tools[0] must be"),
    ],
)
def test_what_cannot_be_done_with_tools_is_refused(engine: FakeEngine, body: dict[str, Any], reason: str):
    error = error_of(client_of(engine, **CALLING).post("/v1/chat/completions", json={"messages": HELLO, **body}))

    assert reason in error["message"]


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "gemma4", "pythonic", "openai"])
@pytest.mark.parametrize("required", [True, [["a"]], -1, "a"])
def test_a_schema_that_is_none_is_never_our_fault(engine: FakeEngine, name: str, required: Any):
    parameters = {"type": "object", "properties": {"a": {"type": "string"}}, "required": required}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}]
    client = client_of(engine, enable_auto_tool_choice=True, tool_call_parser=name)
    for choice in ("required", "auto"):
        answer = client.post("/v1/chat/completions", json={"messages": HELLO, "tools": tools, "tool_choice": choice})
        assert answer.status_code == 400, answer.text
        assert error_of(answer)["param"] == "tools"


@pytest.mark.parametrize("options", [{}, {"tool_call_parser": "hermes"}])
def test_calls_need_a_server_that_reads_them(engine: FakeEngine, options: dict[str, Any]):
    error = error_of(client_of(engine, **options).post("/v1/chat/completions", json={"messages": HELLO, "tools": ALL}))

    assert "--enable-auto-tool-choice" in error["message"]


@pytest.mark.parametrize(
    "options",
    [
        {"enable_auto_tool_choice": True},
        {"tool_call_parser": "nobodys"},
        {"reasoning_parser": "nobodys"},
        {"enable_reasoning_content": True},
    ],
)
def test_options_that_cannot_be_honoured_are_refused(options: dict[str, Any]):
    with pytest.raises(ConfigError, match=next(iter(options))):
        ServerConfig(**options)


def test_auto_needs_a_template_that_tells(engine: FakeEngine):
    with pytest.raises(ConfigError, match="chat template"):
        serving_state(engine, tool_call_parser="auto", enable_auto_tool_choice=True)


def test_auto_reads_what_the_template_shows(tmp_path: Path):
    template = "{# <tool_call> <think> <|im_start|> #}" + THINKING
    engine = FakeEngine(load_test_tokenizer(tmp_path, chat_template=template), "Hm.</think>" + CALL)
    client = client_of(engine, tool_call_parser="auto", enable_auto_tool_choice=True, reasoning_parser="auto")
    message = chat(client, tools=ALL)["choices"][0]["message"]

    assert message["reasoning"] == "Hm."
    assert message["tool_calls"][0]["function"]["name"] == "search"


def test_reasoning_has_a_field_of_its_own(thinking_engine: FakeEngine):
    client = client_of(thinking_engine, reasoning_parser="qwen3")
    body = chat(client)
    parts = stream(client)

    assert body["choices"][0]["message"]["reasoning"] == "I see."
    assert body["choices"][0]["message"]["content"] == "Yes"
    assert "reasoning_content" not in body["choices"][0]["message"]
    # "I see.", a line break, "</think>": all of it is made of one-byte tokens here.
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("I see.\n</think>")}
    assert "".join(part["delta"].get("reasoning", "") for part in parts) == "I see."
    assert "".join(part["delta"].get("content", "") for part in parts) == "Yes"


def test_the_prompt_decides_what_is_reasoning(thinking_engine: FakeEngine):
    thinking_engine.script = script_ids("Yes")
    client = client_of(thinking_engine, reasoning_parser="qwen3")
    opened = chat(client)["choices"][0]["message"]
    closed = chat(client, add_generation_prompt=False)["choices"][0]["message"]

    assert (opened["reasoning"], opened["content"]) == ("Yes", None)
    assert (closed["reasoning"], closed["content"]) == (None, "Yes")


def test_reasoning_can_be_left_out_and_is_still_counted(thinking_engine: FakeEngine):
    client = client_of(thinking_engine, reasoning_parser="qwen3")
    body = chat(client, include_reasoning=False)

    assert (body["choices"][0]["message"]["reasoning"], body["choices"][0]["message"]["content"]) == (None, "Yes")
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("I see.\n</think>")
    assert not any("reasoning" in part["delta"] for part in stream(client, include_reasoning=False))


def test_older_clients_find_reasoning_under_its_older_name(thinking_engine: FakeEngine):
    client = client_of(thinking_engine, reasoning_parser="qwen3", enable_reasoning_content=True)

    assert chat(client)["choices"][0]["message"]["reasoning_content"] == "I see."
    assert "".join(part["delta"].get("reasoning_content", "") for part in stream(client)) == "I see."


def test_streamed_usage_counts_reasoning(thinking_engine: FakeEngine):
    client = client_of(thinking_engine, reasoning_parser="qwen3")
    response = client.post("/v1/chat/completions", json={"messages": HELLO, "stream": True, "stream_options": {"include_usage": True}})
    last = json.loads(response.text.strip().split("\n\n")[-2].removeprefix("data: "))

    assert last["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("I see.\n</think>")}


def test_markers_that_are_special_tokens_are_read(engine: FakeEngine):
    end = engine.tokenizer.token_to_id("<|end|>")
    engine.script = script_ids(["<|channel|>analysis<|message|>Hm.", end, "<|start|>assistant<|channel|>final<|message|>Yes"])
    message = chat(client_of(engine, reasoning_parser="openai_gptoss"), skip_special_tokens=True)["choices"][0]["message"]

    assert (message["reasoning"], message["content"]) == ("Hm.", "Yes")


def test_harmony_is_read_whole_or_not_at_all(engine: FakeEngine):
    engine.script = script_ids(
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.now<|channel|>commentary<|message|>{}<|call|>"
    )
    client = client_of(engine, enable_auto_tool_choice=True, tool_call_parser="openai")
    called = chat(client, tools=ALL)["choices"][0]["message"]
    uncalled = chat(client, tools=ALL, tool_choice="none")["choices"][0]

    assert (called["reasoning"], called["content"], called["tool_calls"][0]["function"]["name"]) == ("Hm.", None, "now")
    assert (uncalled["message"]["reasoning"], uncalled["message"]["content"], uncalled["finish_reason"]) == ("Hm.", "{}", "stop")
    with pytest.raises(ConfigError, match="openai_gptoss"):
        serving_state(engine, tool_call_parser="openai", reasoning_parser="qwen3")


def test_tokens_of_a_stream_are_told_once(engine: FakeEngine):
    engine.script = script_ids("Hi" + CALL)
    parts = stream(client_of(engine, **CALLING), tools=ALL, logprobs=True, return_token_ids=True)

    assert [token for part in parts for token in part.get("token_ids", ())] == [*engine.script, 0]
    logprobs = [entry for part in parts for entry in (part["logprobs"] or {"content": []})["content"]]
    assert "".join(entry["token"] for entry in logprobs[:-1]) == "Hi" + CALL


def test_the_tail_of_a_stream_is_not_lost(make_client: Callable[..., TestClient], engine: FakeEngine):
    engine.script = script_ids("a <tool_ca")
    parts = stream(make_client(**CALLING), tools=ALL)

    assert "".join(part["delta"].get("content", "") for part in parts) == "a <tool_ca"


NOW = {"type": "function", "function": {"name": "now"}}
PLAIN = '[{"name": "search", "parameters": {"query": "x"}}, {"name": "now", "parameters": {}}]'


@pytest.mark.parametrize(("options", "said"), [({}, PLAIN), (CALLING, CALL + "\n" + CALL)])
@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (NOW, "stop")])
def test_calls_that_must_come_are_asked_of_the_engine_and_read(
    engine: FakeEngine, options: dict[str, Any], said: str, choice: Any, reason: str
):
    engine.script = script_ids(said)
    client = client_of(engine, **options)
    whole = chat(client, tools=ALL, tool_choice=choice)["choices"][0]
    parts = stream(client, tools=ALL, tool_choice=choice)

    assert engine.seen[-1][1].structured_outputs.grammar
    assert whole["message"]["tool_calls"][0]["function"] == {"name": "search", "arguments": '{"query": "x"}'}
    assert whole["message"]["content"] is None
    assert whole["finish_reason"] == parts[-1]["finish_reason"] == reason
    called = {call["index"] for part in parts for call in part["delta"].get("tool_calls", ())}
    assert len(whole["message"]["tool_calls"]) == len(called) == 2


def test_arguments_of_strict_tools_are_held_to_their_schemas(engine: FakeEngine):
    client = client_of(engine, **CALLING)
    strict = {"type": "function", "function": {**ALL[0]["function"], "strict": True}}
    chat(client, tools=[strict, NOW])
    assert engine.seen[-1][1].structured_outputs.grammar
    chat(client, tools=[ALL[0], NOW])
    assert engine.seen[-1][1].structured_outputs is None
    chat(client, tools=ALL, tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NOW]}})
    assert "now" in engine.seen[-1][1].structured_outputs.grammar
    assert "search" not in engine.seen[-1][1].structured_outputs.grammar


def test_a_schema_for_the_answer_leaves_room_for_calls(engine: FakeEngine):
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    engine.script = script_ids(CALL)
    choice = chat(client_of(engine, **CALLING), tools=ALL, response_format=schema)["choices"][0]

    assert choice["message"]["tool_calls"][0]["function"]["name"] == "search"
    assert "%lark" in engine.seen[-1][1].structured_outputs.grammar


def test_a_budget_of_thinking_reaches_the_engine_with_the_marks(thinking_engine: FakeEngine):
    client = client_of(thinking_engine, reasoning_parser="qwen3")
    chat(client, thinking_token_budget=7)
    params = thinking_engine.seen[-1][1]
    assert (params.thinking_token_budget, params.reasoning_marks.closing, params.reasoning_marks.is_open) == (7, "</think>", True)
    assert params.reasoning_marks.implied_ends == ["<tool_call>"]
    chat(client, thinking_token_budget=-1)
    assert thinking_engine.seen[-1][1].thinking_token_budget is None
    error = error_of(client_of(thinking_engine).post("/v1/chat/completions", json={"messages": HELLO, "thinking_token_budget": 7}))
    assert "--reasoning-parser" in error["message"]
