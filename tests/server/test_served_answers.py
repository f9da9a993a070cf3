"""Reasoning and tool calls through `jaxllm serve` as users run it, over a model that says what it is told."""

from __future__ import annotations

import json
from pathlib import Path

import openai
import pytest

from tests.checkpoints import write_scripted_model
from tests.server.helpers import HELLO
from tests.server.parsers.examples import ALL
from tests.server.served import Served

pytestmark = pytest.mark.heavy

CONTEXT = 512
# The prompt is the same for every conversation, so that the model's script begins with the answer.
PROMPT = "Go\n<think>\n"
TEMPLATE = '{# <|im_start|> <think> <tool_call> #}{{ "Go\\n<think>\\n" }}'
ANSWER = (
    "I should look it up. 😀\n</think>\n\nLet me see.\n<tool_call>\n"
    '{"name": "search", "arguments": {"query": "café & tea", "limit": 3}}\n</tool_call>\n<tool_call>\n{"name": "now"}\n</tool_call>'
)


def test_reasoning_and_calls_reach_the_official_client(tmp_path: Path):
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    (tmp_path / "model").mkdir()
    model = write_scripted_model(tmp_path / "model", ANSWER, start=len(PROMPT), max_positions=CONTEXT)
    flags = ["--chat-template", str(template), "--enable-auto-tool-choice", "--tool-call-parser", "auto", "--reasoning-parser", "auto"]
    server = Served(model, "--enforce-eager", *flags, max_model_len=CONTEXT)
    try:
        with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            whole = client.chat.completions.create(model="scripted", messages=HELLO, tools=ALL, temperature=0)
            parts = list(
                client.chat.completions.create(
                    model="scripted", messages=HELLO, tools=ALL, temperature=0, stream=True, stream_options={"include_usage": True}
                )
            )
    finally:
        server.kill()

    message, deltas = whole.choices[0].message, [part.choices[0].delta for part in parts if part.choices]
    assert message.reasoning == "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == "I should look it up. 😀"
    assert message.content == "".join(delta.content or "" for delta in deltas) == "Let me see."
    called = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]
    assert called == [("search", {"query": "café & tea", "limit": 3}), ("now", {})]
    streamed = ["", ""]
    for delta in deltas:
        for call in delta.tool_calls or ():
            streamed[call.index] += call.function.arguments
    assert streamed == [call.function.arguments for call in message.tool_calls]
    assert whole.choices[0].finish_reason == parts[-2].choices[0].finish_reason == "tool_calls"
    details = whole.usage.completion_tokens_details
    assert details == parts[-1].usage.completion_tokens_details
    assert details.reasoning_tokens == len("I should look it up. 😀\n</think>".encode())
