"""A chat template that shows what it was given, and the tools that the tests of endpoints call."""

from __future__ import annotations

from pathlib import Path

from jaxllm.text.tokenizer import Tokenizer
from tests.server.fake_engine import load_test_tokenizer

SHOWING = (
    "{% if tools %}[tools:{% for tool in tools %}{{ tool.function.name }}{% endfor %}]{% endif %}"
    "{% if reasoning_effort %}[effort:{{ reasoning_effort }}]{% endif %}"
    "{% if enable_thinking is defined %}[think:{{ enable_thinking }}]{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}:{{ c.function.arguments.query }};{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SEARCH = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "x"}}\n</tool_call>'
PARSED = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes", "reasoning_parser": "qwen3"}


def showing_tokenizer(directory: Path) -> Tokenizer:
    return load_test_tokenizer(directory, chat_template=SHOWING)
