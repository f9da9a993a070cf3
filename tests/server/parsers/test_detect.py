"""Formats are told by chat templates, and open reasoning by prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxllm.server.parsers import REASONING_FORMATS, TOOL_FORMATS, OutputParser, opens_reasoning, reasoning_format_of, tool_format_of
from jaxllm.text.chat_template import ChatTemplates
from tests.server.parsers.examples import tool as tool_of
from tests.server.parsers.parsed import parse

TEMPLATES: dict[str, tuple[str | None, str | None]] = {
    "Apertus-8B-Instruct": ("apertus", None),
    "ByteDance-Seed-OSS": ("seed_oss", "seed_oss"),
    "CohereForAI-c4ai-command-r-plus-tool_use": ("cohere_command_r", None),
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": ("cohere_command3", "cohere_command3"),
    "GLM-4.6": ("glm45", "think"),
    "GLM-4.7-Flash": ("glm45", "think"),
    "HuggingFaceTB-SmolLM3-3B": (None, "think"),
    "Kimi-K2-Instruct": ("kimi_k2", None),
    "Kimi-K2-Thinking": ("kimi_k2", "kimi_k2"),
    "LFM2-8B-A1B": ("lfm2", None),
    "MiniMax-M2": ("minimax_m2", "think"),
    "Mistral-Small-3.2-24B-Instruct-2506": ("mistral", None),
    "NVIDIA-Nemotron-Nano-v2": ("nemotron_json", "think"),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": ("hermes", None),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ("hermes", None),
    "Qwen-QwQ-32B": ("hermes", "qwen3"),
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", None),
    "Qwen-Qwen3-0.6B": ("hermes", "qwen3"),
    "Qwen3-Coder": ("qwen3_coder", None),
    "Qwen3.5-4B": ("qwen3_coder", "qwen3"),
    "StepFun3.5-Flash": ("qwen3_coder", "qwen3"),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": ("deepseek_v3", "deepseek_r1"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("deepseek_v3", "deepseek_r1"),
    "deepseek-ai-DeepSeek-V3.1": ("deepseek_v31", "deepseek_r1"),
    "deepseek-ai-DeepSeek-V3.2": ("deepseek_v32", "deepseek_r1"),
    "fireworks-ai-llama-3-firefunction-v2": ("phi4_mini_json", None),
    "google-gemma-2-2b-it": (None, None),
    "google-gemma-4-31B-it": ("gemma4", "gemma4"),
    "ibm-granite-granite-3.3-2B-Instruct": ("granite", "granite33"),
    "ibm-granite-granite-4.0": ("hermes", None),
    "meetkai-functionary-medium-v3.1": ("functionary_v31", None),
    "meta-llama-Llama-3.1-8B-Instruct": ("llama3_json", None),
    "meta-llama-Llama-3.2-3B-Instruct": ("llama3_json", None),
    "meta-llama-Llama-3.3-70B-Instruct": ("llama3_json", None),
    "microsoft-Phi-3.5-mini-instruct": (None, None),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("mistral", "mistral"),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral_pre_v11", None),
    "openai-gpt-oss-120b": ("openai", "openai_gptoss"),
    "openbmb-MiniCPM5-1B": ("minicpm5", "think"),
    "unsloth-mistral-Devstral-Small-2507": ("mistral", None),
    "vllm-template_alpaca": (None, None),
    "vllm-template_chatglm2": (None, None),
    "vllm-template_chatml": (None, None),
    "vllm-template_falcon": (None, None),
    "vllm-tool_deepseekr1": ("deepseek_v3", "deepseek_r1"),
    "vllm-tool_deepseekv3": ("deepseek_v3", None),
    "vllm-tool_gemma3_pythonic": ("pythonic", None),
    "vllm-tool_glm4": ("glm45", None),
    "vllm-tool_granite": ("granite", None),
    "vllm-tool_hermes": ("hermes", None),
    "vllm-tool_hunyuan_a13b": ("jamba", "hunyuan_a13b"),
    "vllm-tool_internlm2_tool": ("internlm", None),
    "vllm-tool_llama3.1_json": ("llama3_json", None),
    "vllm-tool_llama3.2_json": ("llama3_json", None),
    "vllm-tool_llama3.2_pythonic": ("pythonic", None),
    "vllm-tool_llama4_json": ("llama3_json", None),
    "vllm-tool_llama4_pythonic": ("llama4_pythonic", None),
    "vllm-tool_mistral": ("mistral_pre_v11", None),
    "vllm-tool_mistral_parallel": ("mistral_pre_v11", None),
    "vllm-tool_phi4_mini": ("phi4_mini_json", None),
    "vllm-tool_toolace": ("pythonic", None),
    "vllm-tool_xlam_qwen": ("xlam", None),
}


def test_every_public_template_is_told_apart(conformance_data: Path) -> None:
    found = {}
    for path in sorted((conformance_data / "chat_templates").glob("*.jinja")):
        template = path.read_text()
        found[path.stem] = (tool_format_of(template), reasoning_format_of(template))
    assert found == TEMPLATES


# Templates that do not render calls, leave them half written, or need variables that only they know.
NOT_READ_BACK = {
    "CohereForAI-c4ai-command-r-plus-tool_use",
    "Kimi-K2-Instruct",
    "Kimi-K2-Thinking",
    "LFM2-8B-A1B",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    "fireworks-ai-llama-3-firefunction-v2",
    "ibm-granite-granite-3.3-2B-Instruct",
    "vllm-tool_gemma3_pythonic",
    "vllm-tool_glm4",
    "vllm-tool_llama4_pythonic",
    "vllm-tool_phi4_mini",
}


@pytest.mark.parametrize("name", sorted(name for name, (tool, _) in TEMPLATES.items() if tool and name not in NOT_READ_BACK))
def test_calls_are_read_back_as_templates_write_them(conformance_data: Path, name: str) -> None:
    special_tokens = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    templates = ChatTemplates({"default": (conformance_data / "chat_templates" / f"{name}.jinja").read_text()}, special_tokens)
    tool = tool_of("search", query={"type": "string", "description": "what"}, limit={"type": "integer", "description": "how many"})
    tool["function"]["description"] = "Search."

    def render(messages: list[dict[str, Any]], *, answer: bool) -> str:
        return templates.render(messages, [tool], add_generation_prompt=answer)

    arguments = {"query": "Paris", "limit": 3}
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "search", "arguments": json.dumps(arguments)}}
    asked = [{"role": "user", "content": "hi"}]
    prompt = render(asked, answer=True)
    told = render([*asked, {"role": "assistant", "content": "", "tool_calls": [call]}], answer=False)
    # A template may open reasoning for an answer that is to come, and none for one that it shows: back to the last whole marker.
    same = next((at for at, (one, other) in enumerate(zip(prompt, told, strict=False)) if one != other), len(prompt))
    while same < len(prompt) and told[same - 1] not in ">\n":
        same -= 1
    form, reasoning = TEMPLATES[name]
    parser = OutputParser(TOOL_FORMATS[form or ""], REASONING_FORMATS.get(reasoning or ""), schemas=[tool], starts_in_reasoning=False)
    assert parse(parser, told[same:]).named == [("search", arguments)]


@pytest.mark.parametrize(
    ("template", "tool", "reasoning"),
    [
        ("{{ messages }}", None, None),
        ("Reply within <tool_call></tool_call>. <|im_start|> <think>", "hermes", "qwen3"),
        ("<tool_call>\n<function=f>\n<parameter=p>", "qwen3_coder", None),
        ("<｜Assistant｜><think> <｜tool▁calls▁begin｜>", "deepseek_v31", "deepseek_r1"),
        ("[TOOL_CALLS] [ARGS] [THINK]", "mistral", "mistral"),
        ("<|start|>assistant<|channel|>final<|message|>", "openai", "openai_gptoss"),
    ],
)
def test_a_template_tells_its_formats(template: str, tool: str | None, reasoning: str | None) -> None:
    assert (tool_format_of(template), reasoning_format_of(template)) == (tool, reasoning)


def test_detection_names_formats_that_there_are() -> None:
    tools, reasonings = zip(*TEMPLATES.values(), strict=True)
    assert set(tools) - {None} <= set(TOOL_FORMATS)
    assert set(reasonings) - {None} <= set(REASONING_FORMATS)


@pytest.mark.parametrize(
    ("prompt", "continues", "opened"),
    [
        ("user: hi\nassistant: <think>\n", False, True),
        ("user: hi\nassistant: <think>\n\n</think>\n\n", False, False),
        ("user: what is <think>?\nassistant: ", False, False),
        ("user: hi\nassistant: <think>\nI see", True, True),
        ("user: hi\nassistant: <think>\nI see</think> Yes", True, False),
        ("user: hi\nassistant: ", False, False),
    ],
)
def test_a_prompt_tells_whether_reasoning_is_open(prompt: str, continues: bool, opened: bool) -> None:
    assert opens_reasoning(prompt, REASONING_FORMATS["qwen3"], continues=continues) is opened
