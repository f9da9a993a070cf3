"""The official client gets the message of every format, streamed and not, from a model that says it in the real engine."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from jaxllm.async_llm import AsyncLLM
from jaxllm.config import EngineConfig
from jaxllm.server.app import create_app
from jaxllm.server.parsers import REASONING_FORMATS
from tests.checkpoints import script_ids, write_scripted_model
from tests.server.conftest import serving_state
from tests.server.helpers import HELLO
from tests.server.parsers.examples import ALL, REASONING_EXAMPLES, TOOL_EXAMPLES, Example
from tests.server.test_answers import Streamed

pytestmark = pytest.mark.heavy

CASES = [("tool", name, next(example for example in examples if example.calls)) for name, examples in TOOL_EXAMPLES.items()]
CASES += [("reasoning", name, examples[0]) for name, examples in REASONING_EXAMPLES.items()]
# One script holds them all, an end of sequence behind each: how long a prompt is decides which of them is said.
SCRIPTS = [[*script_ids(example.output), 0] for _, _, example in CASES]
STARTS = [16 + sum(map(len, SCRIPTS[:i])) for i in range(len(SCRIPTS))]


def test_every_format_comes_through_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Steps of rows of thousands of positions: a little optimisation pays.
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"].replace("level=0", "level=1"))
    context = STARTS[-1] + len(SCRIPTS[-1]) + 1
    write_scripted_model(tmp_path, [token for script in SCRIPTS for token in script], start=STARTS[0], max_positions=context)

    async def check_all() -> None:
        config = EngineConfig.from_options(
            model=str(tmp_path), max_model_len=context, max_num_seqs=32, max_num_batched_tokens=256, enforce_eager=True
        )
        async with AsyncLLM(config=config) as engine:
            *others, longest = [check(engine, *case, start) for case, start in zip(CASES, STARTS, strict=True)]
            await longest  # the prompts of all others are its beginnings, and cached
            await asyncio.gather(*others)

    asyncio.run(check_all())


async def check(engine: AsyncLLM, kind: str, name: str, example: Example, prompt_len: int) -> None:
    options: dict[str, Any] = {"enable_auto_tool_choice": True, "tool_call_parser": name} if kind == "tool" else {"reasoning_parser": name}
    opened = ""
    if kind == "reasoning" and (form := REASONING_FORMATS[name]).implied and not example.output.lstrip().startswith(form.starts):
        opened = form.starts[0]
    app = create_app(serving_state(engine, trust_request_chat_template=True, **options))
    asked: dict[str, Any] = {
        "model": engine.model_name,
        "messages": HELLO,
        "temperature": 0,
        "extra_body": {"chat_template": "{{ '' }}" + "a" * (prompt_len - len(opened)) + opened},
    }
    if kind == "tool":
        asked["tools"] = example.tools or ALL
    async with (
        httpx.AsyncClient(transport=httpx.ASGITransport(app=app)) as http,
        openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", max_retries=0, http_client=http) as client,
    ):
        whole = (await client.chat.completions.create(**asked)).choices[0]
        streamed = Streamed()
        async for part in await client.chat.completions.create(**asked, stream=True):
            streamed.add(part.choices[0])

    calls = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls or ()]
    assert [(called, json.loads(arguments)) for called, arguments in calls] == [call[:2] for call in example.calls], name
    assert [(call["name"], call["arguments"]) for call in streamed.calls] == calls, name
    assert (whole.message.content or "") == streamed.content == example.content, name
    assert (getattr(whole.message, "reasoning", None) or "") == streamed.reasoning == example.reasoning, name
    assert whole.finish_reason == streamed.finish_reason == ("tool_calls" if calls else "stop"), name
