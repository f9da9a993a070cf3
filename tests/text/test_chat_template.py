"""Chats to prompts: what transformers renders, what clients really send, and refusals in the template's words."""

from __future__ import annotations

import datetime
import json

import pytest

from jaxllm.errors import ConfigError, InvalidRequestError, NotSupportedError
from jaxllm.text import chat_template
from jaxllm.text.chat_template import ChatTemplates

CHATML = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
PARTS_ONLY = "{% for m in messages %}[{{ m.role }}]{% for part in m.content %}{{ part.text }};{% endfor %}{% endfor %}"
BOTH = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endif %}{% endfor %}"
)
USER = [{"role": "user", "content": "Hello"}]


def render(template, messages=USER, tools=None, **more):
    templates = template if isinstance(template, dict) else {"default": template}
    special_tokens = {"bos_token": "<BOS>", "eos_token": "<EOS>"}
    return ChatTemplates(templates, special_tokens).render(messages, tools, **({"add_generation_prompt": False} | more))


def test_the_generation_prompt_is_added_on_request():
    assert render(CHATML) == "<|user|>Hello<|end|>"
    assert render(CHATML, add_generation_prompt=True) == "<|user|>Hello<|end|><|assistant|>"


def test_special_tokens_and_further_variables_are_defined():
    assert render("{{ bos_token }}{{ enable_thinking }}", variables={"enable_thinking": False}) == "<BOS>False"


def test_tools_are_defined_as_none():
    assert render("{{ tools is none }}{{ documents is none }}") == "TrueTrue"


def test_line_breaks_around_blocks_are_trimmed_and_html_is_not_escaped():
    assert render("{% if true %}\n  {{ messages[0].content | tojson }}\n{% endif %}\n", [{"role": "user", "content": "<é>"}]) == '  "<é>"\n'


def test_loop_controls_and_generation_blocks_work():
    template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"

    assert render(template, USER * 2) == "Hello"


def test_the_date_is_at_hand(monkeypatch):
    monkeypatch.setattr(chat_template, "now", lambda: datetime.datetime(2025, 1, 2))

    assert render("{{ strftime_now('%d %b %Y') }}") == "02 Jan 2025"


# ---------------------------------------------------------------- content


def test_text_parts_reach_a_template_that_takes_strings():
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]}]

    assert render(CHATML, messages) == "<|user|>a\nb<|end|>"


def test_strings_reach_a_template_that_takes_parts():
    assert render(PARTS_ONLY) == "[user]Hello;"


def test_a_template_that_takes_both_gets_what_was_sent():
    assert render(BOTH, [*USER, {"role": "user", "content": [{"type": "text", "text": "a"}]}]) == "Hello<a>"


def test_the_content_format_can_be_forced():
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]

    assert render(BOTH, messages, content_format="string") == "a"
    assert render(BOTH, content_format="openai") == "<Hello>"
    with pytest.raises(InvalidRequestError, match="auto, string, openai"):
        render(BOTH, content_format="xml")


def test_a_tool_result_in_parts_reaches_the_prompt():
    messages = [
        {"role": "user", "content": "?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "15C"}]},
    ]

    assert render(CHATML, messages).endswith("<|tool|>15C<|end|>")


def test_a_turn_of_calls_alone_has_no_text_unless_the_template_wants_some():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "15C"}]
    strict = "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}"

    assert render(strict, messages).endswith("<assistant><tool>15C")
    assert render("{{ messages[1].content is defined }}", messages) == "False"
    with pytest.raises(InvalidRequestError, match="roles"):
        render("{{ raise_exception('only two roles') }}", messages)


def test_media_is_refused():
    with pytest.raises(NotSupportedError, match=r"messages\[0\].content\[0\] has type 'image_url'"):
        render(CHATML, [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}])
    with pytest.raises(NotSupportedError, match="only text"):
        render(CHATML, [{"role": "user", "content": [{"type": []}]}])


def test_tool_call_arguments_become_objects():
    call = {"type": "function", "function": {"name": "f", "arguments": '{"city": "Paris"}'}}
    messages = [*USER, {"role": "assistant", "tool_calls": [call]}]

    assert render("{{ messages[1].tool_calls[0].function.arguments.city }}", messages) == "Paris"
    assert call["function"]["arguments"] == '{"city": "Paris"}'


@pytest.mark.parametrize(("arguments", "complaint"), [("{", "not valid JSON"), ("[1]", "must be a JSON object")])
def test_bad_tool_call_arguments_are_refused(arguments, complaint):
    messages = [*USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]

    with pytest.raises(InvalidRequestError, match=complaint):
        render(CHATML, messages)


def test_nulls_are_left_out_of_messages():
    assert render("{{ 'name' in messages[0] }}", [{"role": "user", "content": "x", "name": None}]) == "False"


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
def test_reasoning_is_found_under_the_names_that_templates_read(name):
    messages = [*USER, {"role": "assistant", "content": "x", name: "why"}]

    assert render("{{ messages[1].reasoning_content }}{{ messages[1].thinking }}", messages) == "whywhy"


def test_python_functions_are_described_as_tools():
    def get_weather(city: str) -> str:
        """Weather of a city.

        Args:
            city: Its name.
        """
        return city

    rendered = json.loads(render("{{ tools | tojson }}", tools=[get_weather]))

    assert rendered[0]["function"]["name"] == "get_weather"
    assert rendered[0]["function"]["parameters"]["required"] == ["city"]


def test_developer_messages_are_system_messages_where_the_template_knows_no_developer():
    messages = [{"role": "developer", "content": "x"}]

    assert render(CHATML, messages) == "<|system|>x<|end|>"
    assert render(CHATML + "{# developer #}", messages) == "<|developer|>x<|end|>"


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "at least one message"),
        ("hi", "must be a list"),
        (["hi"], "must be an object"),
        ([{"content": "hi"}], "role must be a string"),
        ([{"role": "user", "content": 5}], "content must be a string"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "text must be a string"),
        ([{"role": "user", "content": object()}], "no JSON value"),
    ],
)
def test_messages_that_are_none_are_refused(messages, complaint):
    with pytest.raises(InvalidRequestError, match=complaint):
        render(CHATML, messages)


# ---------------------------------------------------------------- continuing


@pytest.mark.parametrize("content", ["The answer is ", "The answer is"])
def test_the_last_message_is_left_open(content):
    messages = [*USER, {"role": "assistant", "content": content}]

    assert render(CHATML, messages, continue_final_message=True) == f"<|user|>Hello<|end|><|assistant|>{content}"


def test_a_template_that_trims_leaves_the_message_trimmed():
    messages = [*USER, {"role": "assistant", "content": "The answer is "}]
    trimming = CHATML.replace("m.content", "m.content.strip()")

    assert render(trimming, messages, continue_final_message=True).endswith("<|assistant|>The answer is")


def test_the_last_part_is_left_open():
    messages = [*USER, {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]

    assert render(PARTS_ONLY, messages, continue_final_message=True) == "[user]Hello;[assistant]a;b"


def test_a_message_that_cannot_be_continued_is_refused():
    with pytest.raises(InvalidRequestError, match="text to continue"):
        render(CHATML, [{"role": "assistant", "tool_calls": []}], continue_final_message=True)
    with pytest.raises(InvalidRequestError, match="leaves the last message out"):
        render("{{ messages[0].content }}", USER * 2, continue_final_message=True)
    with pytest.raises(InvalidRequestError, match="exclude each other"):
        render(CHATML, continue_final_message=True, add_generation_prompt=True)


# ---------------------------------------------------------------- templates and refusals


def test_chats_with_tools_use_the_tool_template():
    templates = {"default": "plain", "tool_use": "tools", "rag": "documents"}

    assert render(templates) == "plain"
    assert render(templates, tools=[{"type": "function"}]) == "tools"
    assert render(templates, chat_template="rag") == "documents"
    assert render(templates, chat_template="{{ messages[0].content }}") == "Hello"


def test_a_chat_without_a_template_is_refused():
    with pytest.raises(InvalidRequestError, match="no default chat template"):
        render({})
    with pytest.raises(InvalidRequestError, match="templates named rag"):
        render({"rag": "x"})
    with pytest.raises(InvalidRequestError, match="neither a Jinja template nor the name"):
        render(CHATML, chat_template="nonsense")


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].nothing.more }}", "no attribute 'nothing'"),
        ("{{ messages[0].content + 5 }}", "cannot render"),
        ("{{ messages[7].content }}", "has no element 7"),
        ("{% if %}", "does not compile"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_a_template_that_fails_refuses_the_request_in_its_own_words(template, complaint):
    with pytest.raises(InvalidRequestError, match=complaint):
        render(template)


def test_a_template_with_a_mistake_is_found_at_start():
    with pytest.raises(ConfigError, match="does not compile"):
        ChatTemplates({"default": "{% if %}"}, {}).check()


def test_variables_cannot_replace_the_messages():
    with pytest.raises(InvalidRequestError, match="may not set 'messages'"):
        render(CHATML, variables={"messages": []})


# ---------------------------------------------------------------- public templates


def test_public_templates_render_as_transformers_renders_them(conformance_data, monkeypatch):
    folder = conformance_data / "chat_templates"
    monkeypatch.setattr(chat_template, "now", lambda: datetime.datetime(2025, 1, 2))
    conversations = json.loads((folder / "conversations.json").read_text("utf-8"))
    wrong, rows = [], 0

    for line in (folder / "goldens.jsonl").read_text("utf-8").splitlines():
        golden = json.loads(line)
        variables = dict(conversations[golden["conversation"]])
        options = {
            "messages": variables.pop("messages"),
            "tools": variables.pop("tools", None),
            "add_generation_prompt": variables.pop("add_generation_prompt", True),
            # transformers hands lists of parts on as they are.
            "content_format": "openai" if golden["conversation"] == "content_parts" else "auto",
        }
        template = (folder / golden["template"]).read_text("utf-8")
        rows += 1
        try:
            outcome = render(template, variables=variables, **options)
            right = outcome == golden.get("rendered")
        except InvalidRequestError as error:
            outcome = str(error)
            right = "error" in golden and golden["error"].split(": ", 1)[1] in outcome
        if not right:
            wrong.append((golden["template"], golden["conversation"], outcome))

    assert rows > 100
    assert wrong == []


def test_text_parts_reach_the_prompt_with_every_public_template(conformance_data):
    for file in sorted((conformance_data / "chat_templates").glob("*.jinja")):
        template = file.read_text("utf-8")
        try:
            plain = render(template, USER, content_format="string")
        except InvalidRequestError:
            continue
        parts = render(template, [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}])
        assert parts == plain, file.name


def test_a_turn_of_calls_alone_renders_with_every_public_template_that_takes_calls(conformance_data):
    call = {"id": "call12345", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "call12345", "name": "f", "content": "15C"}
    rendered = 0
    for file in sorted((conformance_data / "chat_templates").glob("*.jinja")):
        template = file.read_text("utf-8")
        try:
            spoken = render(template, [*USER, {"role": "assistant", "content": "", "tool_calls": [call]}, result])
        except InvalidRequestError:
            continue
        rendered += 1
        assert render(template, [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}, result]) == spoken, file.name
    assert rendered > 50
