"""The formats in which models show their reasoning."""

from __future__ import annotations

from jaxllm.server.parsers.formats import ReasoningFormat

_START, _END = "<think>", "</think>"


def _think(name: str, *, implied: bool = True, strip: bool = True, implied_ends: tuple[str, ...] = ()) -> ReasoningFormat:
    return ReasoningFormat(name=name, starts=(_START,), ends=(_END,), implied=implied, strip=strip, implied_ends=implied_ends)


_FORMATS: tuple[ReasoningFormat, ...] = (
    _think("think"),
    _think("deepseek_r1", strip=False),
    _think("olmo3", strip=False),
    _think("qwen3", implied_ends=("<tool_call>",)),
    _think("kimi_k2", implied_ends=("<|tool_calls_section_begin|>",)),
    _think("lfm2", implied=False),
    ReasoningFormat(name="minimax_m2_append_think", kept_with=_START),
    ReasoningFormat(name="mistral", starts=("[THINK]",), ends=("[/THINK]",), anywhere=True, strip=False),
    ReasoningFormat(
        name="granite",
        starts=("Here is my thought process:", "Here's my thought process:"),
        ends=("Here is my response:", "Here's my response:"),
    ),
    ReasoningFormat(name="granite33", starts=(_START,), ends=(_END,), wrapper=("<response>", "</response>")),
    ReasoningFormat(name="ernie45", starts=(_START,), ends=(_END,), implied=True, wrapper=("<response>", "</response>")),
    ReasoningFormat(name="hunyuan_a13b", starts=(_START,), ends=(_END,), wrapper=("<answer>", "</answer>")),
    ReasoningFormat(name="seed_oss", starts=("<seed:think>",), ends=("</seed:think>",), implied=True),
    ReasoningFormat(name="gemma4", starts=("<|channel>thought\n", "<|channel>"), ends=("<channel|>",), anywhere=True, strip=False),
    ReasoningFormat(
        name="cohere_command3",
        starts=("<|START_THINKING|>",),
        ends=("<|END_THINKING|>",),
        implied=True,
        anywhere=True,
    ),
    ReasoningFormat(name="openai_gptoss"),
)

_ALIASES = {
    "think": (
        "glm45",
        "glm47",
        "glm4_moe",
        "ling3",
        "minimax_m2",
        "nemotron",
        "nemotron_v3",
        "step3",
        "step3p5",
        "granite_thinking",
        "hy_v3",
    ),
    "deepseek_r1": ("deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4"),
    "qwen3": ("qwen3_coder", "mimo", "holo2"),
    "hunyuan_a13b": ("hunyuan",),
    "mistral": ("magistral",),
    "cohere_command3": ("cohere", "cohere_command4"),
    "openai_gptoss": ("openai", "harmony"),
}

REASONING_FORMATS: dict[str, ReasoningFormat] = {form.name: form for form in _FORMATS}
REASONING_FORMATS.update({alias: REASONING_FORMATS[name] for name, aliases in _ALIASES.items() for alias in aliases})
