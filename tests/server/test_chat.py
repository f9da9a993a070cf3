from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from tests.checkpoints import script_ids
from tests.server.fake_engine import CONTEXT, EOS, FakeEngine, load_test_tokenizer
from tests.server.helpers import HELLO, choices, chunks, error_of

TEMPLATE = (
    "{% if tools %}[tools:{% for tool in tools %}{{ tool.function.name }}{% endfor %}]{% endif %}"
    "{% if documents %}[docs:{{ documents[0].text }}]{% endif %}"
    "{% if flavour %}[{{ flavour }}]{% endif %}{% if reasoning_effort %}[effort:{{ reasoning_effort }}]{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments.x }}){% endfor %}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


@pytest.fixture
def templated(tmp_path, engine: FakeEngine, make_client):
    """A client whose prompts show what the template was given, and a way to read the last one."""
    engine.tokenizer = load_test_tokenizer(tmp_path, chat_template=TEMPLATE)

    def prompt_of(**body) -> str:
        response = make_client(trust_request_chat_template=True).post("/v1/chat/completions", json={"messages": HELLO, **body})
        assert response.status_code == 200, response.text
        return engine.tokenizer.decode(engine.seen[-1][0])

    return prompt_of


def chat(client: TestClient, **body):
    response = client.post("/v1/chat/completions", json={"messages": HELLO, **body})
    assert response.status_code == 200, response.text
    return response.json()


def stream(client: TestClient, **body) -> str:
    response = client.post("/v1/chat/completions", json={"messages": HELLO, "stream": True, **body})
    assert response.status_code == 200, response.text
    return response.text


def refused(client: TestClient, **body):
    return error_of(client.post("/v1/chat/completions", json={"messages": HELLO, **body}))


def test_an_answer_has_message_reason_and_usage(client: TestClient):
    body = chat(client)

    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    (choice,) = body["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == "Hello world"
    assert choice["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == 12


def test_a_stream_starts_with_the_role_and_ends_each_choice_once(client: TestClient):
    body = stream(client, n=2, temperature=1)

    for index in (0, 1):
        parts = choices(body, index)
        assert parts[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(part["delta"].get("content", "") for part in parts) == "Hello world"
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["stop"]
        assert parts[-1]["delta"] == {}
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks(body))
    assert len({chunk["id"] for chunk in chunks(body)}) == 1


def test_the_context_is_the_default_limit(client: TestClient, engine: FakeEngine):
    engine.script = script_ids("x" * CONTEXT)

    body = chat(client)

    assert body["usage"]["total_tokens"] == CONTEXT
    assert body["choices"][0]["finish_reason"] == "length"


def test_max_completion_tokens_goes_before_max_tokens(client: TestClient):
    assert chat(client, max_completion_tokens=2, max_tokens=5)["usage"]["completion_tokens"] == 2
    assert chat(client, max_tokens=5)["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_bad_limits_are_refused_under_the_name_that_the_client_used(client: TestClient, name):
    assert refused(client, **{name: 0})["param"] == name
    assert refused(client, **{name: 10**9})["param"] == name


def test_logprobs_show_tokens_bytes_and_the_best_alternatives(client: TestClient):
    content = chat(client, logprobs=True, top_logprobs=2, max_tokens=1)["choices"][0]["logprobs"]["content"]

    assert content == [
        {
            "token": "H", "logprob": -0.25, "bytes": [72],
            "top_logprobs": [{"token": "H", "logprob": -0.25, "bytes": [72]}, {"token": "I", "logprob": -1.0, "bytes": [73]}],
        }
    ]  # fmt: skip


def test_logprobs_without_alternatives(client: TestClient):
    (entry,) = chat(client, logprobs=True, max_tokens=1)["choices"][0]["logprobs"]["content"]

    assert (entry["token"], entry["top_logprobs"]) == ("H", [])


def test_bytes_of_tokens_within_a_character_join_to_it(client: TestClient, engine: FakeEngine):
    engine.script = script_ids("😀")

    whole = chat(client, logprobs=True, max_tokens=4)["choices"][0]
    streamed = choices(stream(client, logprobs=True, max_tokens=4))

    for content in (whole["logprobs"]["content"], [e for part in streamed if part["logprobs"] for e in part["logprobs"]["content"]]):
        assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "😀"
        assert content[0]["token"] == "bytes:\\xf0"
    assert whole["message"]["content"] == "".join(part["delta"].get("content", "") for part in streamed) == "😀"


def test_impossible_tokens_have_a_finite_logprob(client: TestClient):
    top = chat(client, logprobs=True, top_logprobs=4, max_tokens=1)["choices"][0]["logprobs"]["content"][0]["top_logprobs"]

    assert top[-1]["logprob"] == -9999.0


def test_tokens_may_be_shown_as_ids(client: TestClient):
    (entry,) = chat(client, logprobs=True, top_logprobs=1, max_tokens=1, return_tokens_as_token_ids=True)["choices"][0]["logprobs"][
        "content"
    ]

    assert entry["token"] == entry["top_logprobs"][0]["token"] == f"token_id:{script_ids('H')[0]}"
    assert entry["bytes"] == [72]


def test_logprobs_of_chosen_ids_are_returned(client: TestClient, engine: FakeEngine):
    ids = script_ids("xyz")

    (entry,) = chat(client, logprobs=True, logprob_token_ids=ids, max_tokens=1)["choices"][0]["logprobs"]["content"]

    assert [top["token"] for top in entry["top_logprobs"]] == ["H", "x", "y", "z"]


def test_token_ids_and_prompt_logprobs_are_returned_on_request(client: TestClient, engine: FakeEngine):
    body = chat(client, return_token_ids=True, prompt_logprobs=0)

    assert body["prompt_token_ids"] == engine.seen[0][0]
    assert body["choices"][0]["token_ids"] == [*script_ids("Hello world"), EOS]
    assert len(body["prompt_logprobs"]) == len(engine.seen[0][0])
    assert body["prompt_logprobs"][0] is None


def test_streams_carry_token_ids_on_request(client: TestClient, engine: FakeEngine):
    parts = choices(stream(client, return_token_ids=True))

    assert parts[0]["prompt_token_ids"] == engine.seen[0][0]
    assert [token for part in parts for token in part.get("token_ids", [])] == [*script_ids("Hello world"), EOS]


def test_content_may_be_text_parts_of_every_name(templated):
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, "c", {"type": "refusal", "refusal": "d"}]

    prompt = templated(messages=[{"role": "user", "content": parts}])

    assert [prompt.index(letter) for letter in "abcd"] == sorted(prompt.index(letter) for letter in "abcd")
    assert "type" not in prompt


def test_tool_results_given_as_parts_reach_the_prompt(templated):
    messages = [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 7}'}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "15C"}]},
    ]

    assert templated(messages=messages) == "<user>weather?</user><assistant>f(7)</assistant><tool>15C</tool><assistant>"


def test_developer_messages_are_system_messages_for_templates_that_know_no_other(templated):
    assert templated(messages=[{"role": "developer", "content": "be brief"}]) == "<system>be brief</system><assistant>"


def test_tools_are_shown_to_the_model_with_tool_choice_none(templated):
    assert templated(tools=TOOLS, tool_choice="none").startswith("[tools:weather]")


def test_template_variables_documents_and_effort_reach_the_template(templated):
    prompt = templated(chat_template_kwargs={"flavour": "mint"}, documents=[{"text": "doc"}], reasoning_effort="low")

    assert prompt.startswith("[docs:doc][mint][effort:low]")


def test_the_final_message_can_be_continued(templated):
    messages = [*HELLO, {"role": "assistant", "content": "Once upon"}]

    assert templated(messages=messages, continue_final_message=True) == "<user>hi</user><assistant>Once upon"
    assert templated(messages=messages, continue_final_message=True, add_generation_prompt=False).endswith("Once upon")


def test_the_generation_prompt_can_be_left_out(templated):
    assert templated(add_generation_prompt=False) == "<user>hi</user>"


def test_a_trusted_server_takes_templates_from_requests(templated):
    assert templated(chat_template="{{ messages[0].content }}!") == "hi!"


def test_templates_from_requests_are_refused_by_default(client: TestClient):
    error = refused(client, chat_template="{{ messages }}")

    assert error["param"] == "chat_template"
    assert "--trust-request-chat-template" in error["message"]


def test_echo_repeats_the_message_that_is_continued(client: TestClient):
    messages = [*HELLO, {"role": "assistant", "content": "Say: "}]
    options = {"messages": messages, "continue_final_message": True, "echo": True}

    assert chat(client, **options)["choices"][0]["message"]["content"] == "Say: Hello world"
    streamed = choices(stream(client, **options))
    assert streamed[1]["delta"] == {"content": "Say: "}
    assert "".join(part["delta"].get("content", "") for part in streamed) == "Say: Hello world"


@pytest.mark.parametrize(
    ("messages", "where"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages.0"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": 5, "content": "hi"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "nonsense"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [5]}], "messages[0].content[0]"),
        ([{"role": "user", "content": ["a", {"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content[1]"),
        ([{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}], "messages[0].content[0]"),
        ([{"role": "assistant", "tool_calls": 5}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [5]}], "messages[0].tool_calls[0]"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"arguments": "[" * 50_000}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_messages_that_are_none_are_refused_by_their_place(client: TestClient, messages, where):
    error = refused(client, messages=messages)

    assert error["param"].startswith("messages")
    assert where in error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": []}, "tools"),
        ({"tools": TOOLS}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "auto"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "news"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "nonsense"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 10**9}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"n": 2, "temperature": 0}, "n"),
    ],
)
def test_what_is_not_offered_or_does_not_fit_is_refused_by_name(client: TestClient, body, param):
    assert refused(client, **body)["param"] == param


def test_harmless_values_of_fields_that_are_not_offered_pass(client: TestClient):
    chat(
        client, response_format={"type": "text"}, tool_choice="none", modalities=["text"], best_of=1, use_beam_search=False,
        parallel_tool_calls=True, user="me", metadata={"a": "b"}, store=False, service_tier="auto", mystery=[1, 2],
    )  # fmt: skip
