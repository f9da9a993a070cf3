"""The formats in which models write tool calls."""

from __future__ import annotations

import re

from jaxllm.server.parsers.formats import HarmonyCalls, HeaderCalls, JsonCalls, PythonCalls, TaggedCalls, ToolFormat
from jaxllm.server.parsers.literals import FUNCTION_GEMMA, GEMMA4

_NAME = r"(?P<name>[^\s<>{}\[\]\"']+)"
_QWEN_XML = TaggedCalls(
    name="qwen3_coder",
    opens=("<tool_call>",),
    closes=("</tool_call>",),
    call_opens=("<function=",),
    call_closes=("</function>", "</tool_call>"),
    name_ends=(">",),
    key_open="<parameter=",
    key_end=">",
    value_close="</parameter>",
    value_stops=("\n<parameter=", "\n</function>"),
    value_lines=True,
)
_GLM = TaggedCalls(
    name="glm45",
    call_opens=("<tool_call>",),
    call_closes=("</tool_call>",),
    name_ends=("\n",),
    name_stops=("<arg_key>", "</tool_call>"),
    key_open="<arg_key>",
    key_end="</arg_key>",
    value_open="<arg_value>",
    value_close="</arg_value>",
    untyped_json=True,
)
_DEEPSEEK_V3 = HeaderCalls(
    name="deepseek_v3",
    opens=("<｜tool▁calls▁begin｜>",),
    closes=("<｜tool▁calls▁end｜>",),
    call_opens=("<｜tool▁call▁begin｜>",),
    call_closes=("```", "<｜tool▁call▁end｜>"),
    header_ends=("\n```json",),
    header=re.compile(rf"\s*(?:\w+<｜tool▁sep｜>)?{_NAME}\s*"),
)
_HERMES = JsonCalls(name="hermes", opens=("<tool_call>",), closes=("</tool_call>",))
_TOOL_CALLS_LIST = JsonCalls(name="jamba", opens=("<tool_calls>",), closes=("</tool_calls>",))
_LLAMA_JSON = JsonCalls(
    name="llama3_json",
    opens=("<|python_tag|>",),
    bare_anywhere="{",
    separators=";",
    strict=True,
    known_names_only=True,
)
_PYTHONIC = PythonCalls(name="pythonic", bare="[", known_names_only=True)

_MISTRAL_LIST = JsonCalls(name="mistral_pre_v11", opens=("[TOOL_CALLS]",), ids=("id",), id_may_follow=True, id_style="mistral")

_FORMATS: tuple[ToolFormat, ...] = (
    _HERMES,
    _QWEN_XML,
    _LLAMA_JSON,
    _PYTHONIC,
    PythonCalls(name="llama4_pythonic", opens=("<|python_start|>",), closes=("<|python_end|>",), bare="[", known_names_only=True),
    PythonCalls(name="olmo3", opens=("<function_calls>",), closes=("</function_calls>",), lines=True),
    PythonCalls(name="lfm2", opens=("<|tool_call_start|>",), closes=("<|tool_call_end|>",)),
    _MISTRAL_LIST,
    HeaderCalls(
        name="mistral",
        opens=("[TOOL_CALLS]",),
        header_ends=("[ARGS]",),
        header_stops=("{",),
        header=re.compile(r"\s*(?P<name>[^\[\]{}\"]*?)\s*(?:\[CALL_ID\](?P<id>[A-Za-z0-9]+))?\s*"),
        listed=_MISTRAL_LIST,
        id_style="mistral",
    ),
    _DEEPSEEK_V3,
    HeaderCalls(
        name="deepseek_v31",
        opens=_DEEPSEEK_V3.opens,
        closes=_DEEPSEEK_V3.closes,
        call_opens=_DEEPSEEK_V3.call_opens,
        call_closes=("<｜tool▁call▁end｜>",),
        header_ends=("<｜tool▁sep｜>",),
    ),
    TaggedCalls(
        name="deepseek_v32",
        opens=("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"),
        closes=("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"),
        call_opens=('<｜DSML｜invoke name="',),
        call_closes=("</｜DSML｜invoke>",),
        name_ends=('">',),
        key_open='<｜DSML｜parameter name="',
        key_end=">",
        key=re.compile(r'(?P<key>[^"]+)"(?:\s+string="(?P<type>true|false)")?\s*'),
        value_close="</｜DSML｜parameter>",
    ),
    HeaderCalls(
        name="kimi_k2",
        opens=("<|tool_calls_section_begin|>",),
        closes=("<|tool_calls_section_end|>",),
        call_opens=("<|tool_call_begin|>",),
        call_closes=("<|tool_call_end|>",),
        header_ends=("<|tool_call_argument_begin|>",),
        header=re.compile(r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s<>{}\"]+?)(?::[0-9]+)?)\s*"),
    ),
    TaggedCalls(
        name="kimi_k3",
        opens=("<|open|>tools<|sep|>",),
        closes=("<|close|>tools<|sep|>",),
        call_opens=('<|open|>call tool="',),
        call_closes=("<|close|>call<|sep|>",),
        name_ends=("<|sep|>",),
        header=re.compile(r'(?P<name>[^"]+)".*'),
        key_open='<|open|>argument key="',
        key_end="<|sep|>",
        key=re.compile(r'(?P<key>[^"]+)"(?:\s+type="(?P<type>\w+)")?\s*'),
        value_close="<|close|>argument<|sep|>",
        silent=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    ),
    _GLM,
    JsonCalls(name="granite", opens=("<|tool_call|>", "<tool_call>"), closes=("</tool_call>",)),
    JsonCalls(name="granite-20b-fc", opens=("<function_call>",)),
    JsonCalls(name="phi4_mini_json", opens=("functools",)),
    JsonCalls(name="internlm", opens=("<|action_start|><|plugin|>",), closes=("<|action_end|>",)),
    _TOOL_CALLS_LIST,
    JsonCalls(
        name="xlam",
        opens=("[TOOL_CALLS]", "<tool_call>", "```json", "```"),
        closes=("</tool_call>", "```"),
        bare="[{",
        strict=True,
        known_names_only=True,
    ),
    TaggedCalls(
        name="minimax_m2",
        opens=("<minimax:tool_call>",),
        closes=("</minimax:tool_call>",),
        call_opens=('<invoke name="',),
        call_closes=("</invoke>",),
        name_ends=('">',),
        key_open='<parameter name="',
        key_end='">',
        value_close="</parameter>",
        value_lines=True,
    ),
    TaggedCalls(
        name="seed_oss",
        opens=("<seed:tool_call>",),
        closes=("</seed:tool_call>",),
        call_opens=_QWEN_XML.call_opens,
        call_closes=("</function>", "</seed:tool_call>"),
        name_ends=(">",),
        key_open="<parameter=",
        key_end=">",
        value_close="</parameter>",
        value_stops=_QWEN_XML.value_stops,
        value_lines=True,
    ),
    TaggedCalls(
        name="step3",
        opens=("<｜tool_calls_begin｜>",),
        closes=("<｜tool_calls_end｜>",),
        call_opens=('<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="', '<steptml:invoke name="'),
        call_closes=("</steptml:invoke><｜tool_call_end｜>", "</steptml:invoke>"),
        name_ends=('">',),
        key_open='<steptml:parameter name="',
        key_end='">',
        value_close="</steptml:parameter>",
    ),
    TaggedCalls(
        name="minicpm5",
        call_opens=('<function name="',),
        call_closes=("</function>",),
        name_ends=('">',),
        key_open='<param name="',
        key_end='">',
        value_close="</param>",
        cdata=True,
    ),
    HeaderCalls(
        name="gemma4",
        opens=("<|tool_call>",),
        closes=("<tool_call|>",),
        call_opens=("call:",),
        header_stops=("{",),
        dialect=GEMMA4,
        silent=("<|tool_response>",),
    ),
    HeaderCalls(
        name="functiongemma",
        opens=("<start_function_call>",),
        closes=("<end_function_call>",),
        call_opens=("call:",),
        header_stops=("{",),
        dialect=FUNCTION_GEMMA,
    ),
    JsonCalls(
        name="cohere_command3",
        opens=("<|START_ACTION|>",),
        closes=("<|END_ACTION|>",),
        names=("tool_name",),
        arguments=("parameters",),
        ids=("tool_call_id",),
        silent=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    JsonCalls(
        name="cohere_command_r",
        opens=("Action:\n```json", "Action: ```json"),
        closes=("```",),
        names=("tool_name",),
        arguments=("parameters",),
    ),
    JsonCalls(name="apertus", opens=("<|tools_prefix|>",), closes=("<|tools_suffix|>",), name_is_key=True),
    JsonCalls(name="nemotron_json", opens=("<TOOLCALL>",), closes=("</TOOLCALL>",)),
    JsonCalls(name="longcat", opens=("<longcat_tool_call>",), closes=("</longcat_tool_call>",)),
    JsonCalls(
        name="gigachat3",
        opens=("<|message_sep|>\n\nfunction call<|role_sep|>\n", "function call<|role_sep|>\n", "<|function_call|>"),
    ),
    HeaderCalls(
        name="functionary_v31",
        opens=("<function=",),
        closes=("</function>",),
        header_ends=(">",),
    ),
    HarmonyCalls(name="openai"),
)

# Names under which vLLM's users know formats that are described once.
_ALIASES = {
    "hermes": ("granite4", "ernie45", "qwen3_json", "mimo"),
    "qwen3_coder": ("qwen3_xml", "qwen3_coder_xml", "step3p5", "step3p5_xml", "nemotron_v3"),
    "llama3_json": ("llama4_json",),
    "mistral": ("mistral_v11",),
    "glm45": ("glm47", "ling3"),
    "jamba": ("hunyuan_a13b", "apriel"),
    "deepseek_v32": ("deepseek_v4",),
    "cohere_command3": ("cohere", "cohere_command4", "cohere2_moe"),
    "phi4_mini_json": ("firefunction_v2",),
    "openai": ("openai_gptoss", "harmony"),
}

TOOL_FORMATS: dict[str, ToolFormat] = {form.name: form for form in _FORMATS}
TOOL_FORMATS.update({alias: TOOL_FORMATS[name] for name, aliases in _ALIASES.items() for alias in aliases})
