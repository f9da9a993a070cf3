"""Which formats a model writes, told by its chat template; and whether a prompt leaves reasoning open."""

from __future__ import annotations

from collections.abc import Sequence

from jaxllm.server.parsers.formats import ReasoningFormat

# Words that must all stand in a template -> the format; the first match counts, so what is particular comes first.
_Rules = Sequence[tuple[tuple[str, ...], str]]

_TOOL_RULES: _Rules = (
    (("<|channel|>", "<|message|>"), "openai"),
    (("｜DSML｜",), "deepseek_v32"),
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<|open|>", "call tool="), "kimi_k3"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<seed:tool_call>",), "seed_oss"),
    (("steptml:invoke",), "step3"),
    (("<|tool_call>",), "gemma4"),
    (("<start_function_call>",), "functiongemma"),
    (("<|START_ACTION|>",), "cohere_command3"),
    (("Action:", "tool_name", "<|CHATBOT_TOKEN|>"), "cohere_command_r"),
    (("<arg_key>",), "glm45"),
    (("<function=", "<parameter="), "qwen3_coder"),
    (('<function name="', '<param name="'), "minicpm5"),
    (("<function=",), "functionary_v31"),
    (("<|action_start|>", "<|plugin|>"), "internlm"),
    (("<|tools_prefix|>",), "apertus"),
    (("<TOOLCALL>",), "nemotron_json"),
    (("functools",), "phi4_mini_json"),
    (("<|tool_list_start|>",), "lfm2"),
    (("<|tool_call_start|>",), "lfm2"),
    (("<function_calls>",), "olmo3"),
    (("[TOOL_CALLS]", "[ARGS]"), "mistral"),
    (("[TOOL_CALLS]",), "mistral_pre_v11"),
    (("<longcat_tool_call>",), "longcat"),
    (("function call<|role_sep|>",), "gigachat3"),
    (("<|function_call|>",), "gigachat3"),
    (("<tool_calls>",), "jamba"),
    (("<|tool_call|>",), "granite"),
    (("<function_call>",), "granite-20b-fc"),
    (("xLAM",), "xlam"),
    (("<tool_call>",), "hermes"),
    (("[func_name1(", "<|header_start|>"), "llama4_pythonic"),
    (("[func_name1(",), "pythonic"),
    (('"parameters": ', "<|start_header_id|>"), "llama3_json"),
    (('"parameters": ', "<|header_start|>"), "llama3_json"),
)

_REASONING_RULES: _Rules = (
    (("<|channel|>", "<|message|>"), "openai_gptoss"),
    (("[THINK]",), "mistral"),
    (("<|channel>",), "gemma4"),
    (("<|START_THINKING|>",), "cohere_command3"),
    (("<seed:think>",), "seed_oss"),
    (("Here is my thought process:",), "granite"),
    (("<think>", "｜Assistant｜"), "deepseek_r1"),
    (("</think>", "｜Assistant｜"), "deepseek_r1"),
    (("<think>", "<|im_middle|>"), "kimi_k2"),
    (("<think>", "<|start_of_role|>", "<response>"), "granite33"),
    (("<think>", "<answer>"), "hunyuan_a13b"),
    (("<think>", "startoftext"), "hunyuan_a13b"),
    (("<think>", "<|im_start|>", "<tool_call>"), "qwen3"),
    (("<think>",), "think"),
)


def tool_format_of(template: str) -> str | None:
    """Name of the format in which a model with this chat template calls tools; None where the template has none that we know."""
    return _first(_TOOL_RULES, template)


def reasoning_format_of(template: str) -> str | None:
    """Name of the format in which a model with this chat template reasons; None where it does not."""
    return _first(_REASONING_RULES, template)


def _first(rules: _Rules, template: str) -> str | None:
    return next((name for words, name in rules if all(word in template for word in words)), None)


def opens_reasoning(prompt: str, form: ReasoningFormat, *, continues: bool) -> bool:
    """Whether the output begins inside of reasoning that the prompt opened.

    Args:
        continues: the prompt ends inside of a message of the assistant, so text may stand between the opening and its end.
    """
    end = max((prompt.rfind(word) for word in form.ends), default=-1)
    for word in form.starts:
        start = prompt.rfind(word)
        if start > end and (continues or not prompt[start + len(word) :].strip()):
            return True
    return False
