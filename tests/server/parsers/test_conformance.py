"""Real model outputs out of public suites come apart as those suites say, however they are cut (`--conformance DIR`).

Rows name formats of two engines; the tables map them to ours. Where the suites disagree among themselves (white space at the ends,
empty or missing text, one output with two readings), either is accepted.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from jaxllm.core_types import EngineRequest
from jaxllm.server.app import create_app
from jaxllm.server.parsers import REASONING_FORMATS, TOOL_FORMATS, OutputParser, ReasoningFormat
from jaxllm.text.grammar_compiler import GrammarCompiler
from tests.checkpoints import script_ids
from tests.server.conftest import serving_state
from tests.server.fake_engine import EOS, VOCAB, FakeEngine
from tests.server.helpers import HELLO, choices
from tests.server.parsers.parsed import Parsed, chunkings, parse

Row = dict[str, Any]

# Templates of the second suite -> (tool format, reasoning format).
TEMPLATES = {
    "google-gemma-4-31B-it": ("gemma4", "gemma4"),
    "google-gemma-2-2b-it": (None, None),
    "Reka-Edge": ("hermes", "qwen3"),
    "Qwen3.5-4B": ("qwen3_coder", "qwen3"),
    "Qwen-QwQ-32B": ("hermes", "qwen3"),
    "openai-gpt-oss-120b": ("openai", "openai_gptoss"),
    "deepseek-ai-DeepSeek-V3.1": ("deepseek_v31", "deepseek_v31"),
    "deepseek-ai-DeepSeek-V3.2": ("deepseek_v32", "deepseek_v32"),
    "deepseek-ai-DeepSeek-V4": ("deepseek_v32", "deepseek_v4"),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": ("deepseek_v3", "deepseek_r1"),
    "llama-cpp-deepseek-r1": ("deepseek_v3", "deepseek_r1"),
    "inclusionai-ling-3.0-flash": ("glm45", "glm45"),
    "GLM-4.7-Flash": ("glm47", "glm47"),
    "Kimi-K3": ("kimi_k3", None),
    "Kimi-K2-Thinking": ("kimi_k2", None),
    "moonshotai-Kimi-K2": ("kimi_k2", None),
    "meta-llama-Llama-3.1-8B-Instruct": ("llama3_json", None),
    "meta-llama-Llama-3.2-3B-Instruct": ("llama3_json", None),
    "meta-llama-Llama-3.3-70B-Instruct": ("llama3_json", None),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("qwen3_coder", "nemotron_v3"),
    "Cohere2MoE": ("cohere_command3", "cohere_command3"),
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": ("cohere_command3", "cohere_command3"),
    "CohereForAI-c4ai-command-r-plus-tool_use": ("cohere_command_r", None),
    "LFM2.5-8B-A1B": ("lfm2", "lfm2"),
    "unsloth-Apriel-1.5": ("apriel", None),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("mistral", "mistral"),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral_pre_v11", None),
    "Mistral-Small-3.2-24B-Instruct-2506": ("mistral", None),
    "unsloth-mistral-Devstral-Small-2507": ("mistral", None),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": ("hermes", None),
    "ibm-granite-granite-4.0": ("granite4", None),
    "MiniMax-M2": ("minimax_m2", "minimax_m2"),
    "fireworks-ai-llama-3-firefunction-v2": ("firefunction_v2", None),
    "GigaChat3-10B-A1.8B": ("gigachat3", None),
    "GigaChat3.1-10B-A1.8B": ("gigachat3", None),
}
REASONING_NAMES = {"deepseekr1": "deepseek_r1", "minimax_m2_append": "minimax_m2_append_think"}
# Templates that leave an answer open in reasoning unless thinking is off.
OPENED = {"Qwen3.5-4B", "Reka-Edge", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "GLM-4.7-Flash", "MiniMax-M2", "deepseek-ai-DeepSeek-V3.2"}


def rows_of(folder: Path, name: str) -> list[Row]:
    return [json.loads(line) for line in (folder / "parsers" / name).read_text().splitlines()]


def test_tool_calls_are_read_as_the_suites_say(conformance_data: Path, engine: FakeEngine) -> None:
    rows = [
        _held_to_a_schema(row, engine) if "json_schema" in row.get("options", {}) else row
        for row in rows_of(conformance_data, "tool_calls.jsonl")
    ]
    assert rows
    failures = [failure for row in rows if (failure := _check_row(row, [row["expected"]], _tool_parser))]
    assert not failures, "\n\n".join(failures)


def test_reasoning_is_read_as_the_suites_say(conformance_data: Path) -> None:
    rows = rows_of(conformance_data, "reasoning.jsonl")
    assert rows
    readings: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        readings[row["format"], row["output"]].append(row["expected"])
    failures = [failure for row in rows if (failure := _check_row(row, readings[row["format"], row["output"]], _reasoning_parser))]
    assert not failures, "\n\n".join(failures)


def test_the_end_of_reasoning_is_seen_where_the_suites_see_it(conformance_data: Path) -> None:
    rows = [row for row in rows_of(conformance_data, "reasoning.jsonl") if row.get("is_reasoning_end") is not None]
    assert rows
    for row in rows:
        parser = _reasoning_parser(row)
        parser.feed(row["output"])
        # A format that keeps reasoning in the answer has no end to see.
        assert parser.in_reasoning is not row["is_reasoning_end"] or row["format"] == "minimax_m2_append", row["id"]


def _held_to_a_schema(row: Row, engine: FakeEngine) -> Row:
    """A row whose request asked for JSON, with what our server answers: the model would write the row's output, some in a code fence, which
    that suite's grammars let through; ours leave of it what fits. Which schema was asked for the data does not say.
    """
    wanted, compiler = script_ids(row["output"]), GrammarCompiler(engine.tokenizer, VOCAB)

    def written(request: EngineRequest) -> list[int]:
        matcher = compiler.submit(request.sampling_params.output_grammar or "", [EOS]).result()
        return [token for token in wanted if matcher.validate_tokens([token]) and matcher.consume_token(token)]

    engine.scripts = written
    tool, _ = TEMPLATES[row["format"].removeprefix("lcpp:")]
    client = TestClient(create_app(serving_state(engine, enable_auto_tool_choice=True, tool_call_parser=tool)))
    schema = {"name": "answer", "schema": {"type": "string"}}
    asked = {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": schema}}
    content: str = client.post("/v1/chat/completions", json=asked).json()["choices"][0]["message"]["content"]
    parts = choices(client.post("/v1/chat/completions", json={**asked, "stream": True}).text)
    assert "".join(part["delta"].get("content") or "" for part in parts) == content
    return row | {"output": content}


def _check_row(row: Row, accepted: list[Row], make: Any) -> str:
    """What is wrong with a row; empty where nothing is."""
    output = row["output"]
    for pieces in [row["chunks"]] if row.get("chunks") else chunkings(output):
        parsed = parse(make(row), pieces, truncated=bool(row.get("partial")))
        if not any(_agrees(parsed, expected, row) for expected in accepted):
            return f"{row['id']} {output!r}\n  cut as {pieces!r}\n  is {parsed}\n  not {accepted} {row.get('expected_reasoning')}"
    return ""


def _agrees(parsed: Parsed, expected: Row, row: Row) -> bool:
    if expected["content"] != "*" and parsed.content.strip() != (expected["content"] or "").strip():
        return False
    reasoning = expected.get("reasoning", row.get("expected_reasoning"))
    if ("reasoning" in expected or "expected_reasoning" in row) and parsed.reasoning.strip() != (reasoning or "").strip():
        return False
    calls = expected.get("tool_calls", "*")
    if calls == "*":
        return True
    if len(calls) != len(parsed.calls):
        return False
    for call, wanted in zip(parsed.calls, calls, strict=True):
        if call.name != wanted["name"] or (wanted.get("id") and call.id != wanted["id"]):
            return False
        if row.get("partial"):
            continue
        if wanted.get("arguments") is not None and json.loads(call.arguments) != wanted["arguments"]:
            return False
    return True


def _tool_parser(row: Row) -> OutputParser:
    name: str = row["format"]
    if not name.startswith("lcpp:"):
        return OutputParser(TOOL_FORMATS[name], schemas=row.get("tools"))
    template = name.removeprefix("lcpp:")
    tool, _ = TEMPLATES[template]
    reasoning = _lcpp_reasoning(template, row)
    start = _lcpp_start(template, row) if reasoning is not None and reasoning.ends else None
    return OutputParser(TOOL_FORMATS.get(tool or ""), reasoning, schemas=row.get("tools"), starts_in_reasoning=start)


def _reasoning_parser(row: Row) -> OutputParser:
    name: str = row["format"]
    if name.startswith("lcpp:"):
        return _tool_parser(row)
    if "thinking_disabled" in row["source"] or "thinking disabled" in row["source"]:
        return OutputParser()
    return OutputParser(None, REASONING_FORMATS[REASONING_NAMES.get(name, name)])


def _lcpp_reasoning(template: str, row: Row) -> ReasoningFormat | None:
    """Reasoning is parsed where the row's options say so; else the answer holds it, with the tag that the prompt ended with."""
    _, name = TEMPLATES[template]
    options = row.get("options", {})
    asked = options.get("reasoning_format", "REASONING_FORMAT_NONE") != "REASONING_FORMAT_NONE"
    if name and (asked or name == "openai_gptoss"):
        return REASONING_FORMATS[name]
    if name and options.get("enable_thinking") == "true":
        return replace(REASONING_FORMATS["minimax_m2_append_think"], kept_with="<think>\n")
    return None


def _lcpp_start(template: str, row: Row) -> bool | None:
    """Whether the template's prompt ends inside of reasoning; left to the format where only the output shows it."""
    if template in OPENED:
        return bool(row.get("options", {}).get("enable_thinking") != "false")
    return None if "</think>" in row["output"] or "<|END_THINKING|>" in row["output"] else False
