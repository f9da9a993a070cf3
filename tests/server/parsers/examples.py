"""Outputs written for these tests, one or more for every format, with what they mean."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Example:
    """An output and its parts; `calls` are (name, arguments, id or None)."""

    output: str
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, Any, str | None]] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schemas = {key: {"type": kind} if isinstance(kind, (str, list)) else kind for key, kind in properties.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": schemas}}}


SEARCH = tool("search", query="string", limit="integer")
WRITE = tool("write_file", path="string", text="string", mode={"anyOf": [{"type": "integer"}, {"type": "null"}]})
PLOT = tool("plot", points="array", style="object", scale="number", grid="boolean")
NOW = tool("now")
ALL = [SEARCH, WRITE, PLOT, NOW]

_SEARCH = ("search", {"query": "cats & dogs", "limit": 3}, None)
_NOW: tuple[str, dict[str, Any], None] = ("now", {}, None)
_CODE = 'if a < b:\n    print("{a}")\n'
_WRITE = ("write_file", {"path": "a.py", "text": _CODE}, None)
_PLOT = ("plot", {"points": [[1, 2.5], [-3, 4e2]], "style": {"color": "red"}, "scale": 0.5, "grid": True}, None)
_SEARCH_JSON = '{"name": "search", "arguments": {"query": "cats & dogs", "limit": 3}}'
_WRITE_JSON = r'{"name": "write_file", "arguments": {"path": "a.py", "text": "if a < b:\n    print(\"{a}\")\n"}}'
_QWEN_WRITE = f"<function=write_file>\n<parameter=path>\na.py\n</parameter>\n<parameter=text>\n{_CODE}\n</parameter>\n</function>"
_LAUNCH = '<node>\n  <parameter name="a">1</parameter>\n  <parameter name="b">2</parameter>\n</node>'
_QWEN_PLOT = (
    "<function=plot>\n<parameter=points>\n[[1, 2.5], [-3, 4e2]]\n</parameter>\n<parameter=style>\n{'color': 'red'}\n</parameter>\n"
    "<parameter=scale>\n0.5\n</parameter>\n<parameter=grid>\nTrue\n</parameter>\n</function>"
)

TOOL_EXAMPLES: dict[str, list[Example]] = {
    "hermes": [
        Example(f"<tool_call>\n{_SEARCH_JSON}\n</tool_call>", calls=[_SEARCH]),
        Example(
            f'Let me look.\n<tool_call>\n{_WRITE_JSON}\n</tool_call>\n<tool_call>\n{{"name": "now"}}\n</tool_call> Done, as <b>asked</b>.',
            "Let me look.\nDone, as <b>asked</b>.",
            calls=[_WRITE, _NOW],
        ),
        # Arguments before the name; arguments as text; a brace too many, a brace too few.
        Example('<tool_call>{"arguments": {"query": "x"}, "name": "search"}</tool_call>', calls=[("search", {"query": "x"}, None)]),
        Example(r'<tool_call>{"name": "search", "arguments": "{\"query\": \"x\"}"}</tool_call>', calls=[("search", {"query": "x"}, None)]),
        Example('<tool_call>{"name": "search", "arguments": {"query": "x"}}}\n</tool_call>', calls=[("search", {"query": "x"}, None)]),
        Example('<tool_call>{"name": "search", "arguments": {"query": "x"}\n</tool_call>', calls=[("search", {"query": "x"}, None)]),
        # Raw line breaks and tabs, trailing commas and Python's words are put right.
        Example(
            '<tool_call>{"name": "f", "arguments": {"a": "1\n\t2", "b": [True, None,], "c": 007,}}</tool_call>',
            calls=[("f", {"a": "1\n\t2", "b": [True, None], "c": 7}, None)],
        ),
        Example(
            "<tool_call>{'name': 'f', 'arguments': {'a': 'say \"x\"', 'b': 'it\\'s'}}</tool_call>",
            calls=[("f", {"a": 'say "x"', "b": "it's"}, None)],
        ),
        Example("no call: <tool_call>nothing</tool_call>", "no call: <tool_call>nothing</tool_call>"),
        Example('<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>'),
        Example("a < b and <tool", "a < b and <tool"),
    ],
    "qwen3_coder": [
        Example(f"I write it.\n\n<tool_call>\n{_QWEN_WRITE}\n</tool_call>", "I write it.", calls=[_WRITE], tools=ALL),
        Example(
            f"<tool_call>\n{_QWEN_PLOT}\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
            calls=[_PLOT, _NOW],
            tools=ALL,
        ),
        # Without the tags around it; without the end of a value.
        Example(_QWEN_WRITE, calls=[_WRITE], tools=ALL),
        Example(
            "<tool_call>\n<function=search>\n<parameter=query>\na\n<parameter=limit>\n5\n</function>\n</tool_call>",
            calls=[("search", {"query": "a", "limit": 5}, None)],
            tools=ALL,
        ),
        Example(
            "<tool_call>\n<function=write_file>\n<parameter=mode>\nnull\n</parameter>\n</function>\n</tool_call>",
            calls=[("write_file", {"mode": None}, None)],
            tools=ALL,
        ),
        Example("Use <function=f> to call it", "Use <function=f> to call it"),
        # Text may hold what looks like its end, where nothing of the format follows.
        Example(
            f"<tool_call>\n<function=write_file>\n<parameter=text>\n{_LAUNCH}\n</parameter>\n</function>\n</tool_call>",
            calls=[("write_file", {"text": _LAUNCH}, None)],
            tools=ALL,
        ),
    ],
    "llama3_json": [
        Example('{"name": "search", "parameters": {"query": "cats & dogs", "limit": 3}}', calls=[_SEARCH], tools=ALL),
        Example('<|python_tag|>{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}', calls=[_NOW, _NOW], tools=ALL),
        Example('As JSON: {"name": "Ann", "parameters": {}}', 'As JSON: {"name": "Ann", "parameters": {}}', tools=ALL),
        Example('{"answer": {"name": "search"}}', '{"answer": {"name": "search"}}', tools=ALL),
    ],
    "pythonic": [
        Example("[search(query='cats & dogs', limit=3), now()]", calls=[_SEARCH, _NOW], tools=ALL),
        Example("[search(query=cats, limit=+3)]", calls=[("search", {"query": "cats", "limit": 3}, None)], tools=ALL),
        Example("[1] see the list", "[1] see the list", tools=ALL),
        Example("[other(a=1)]", "[other(a=1)]", tools=ALL),
    ],
    "llama4_pythonic": [
        Example(
            "<|python_start|>[plot(points=[(1, 2.5), [-3, 4e2]], style={'color': \"red\"}, scale=.5, grid=True)]<|python_end|>",
            calls=[_PLOT],
            tools=ALL,
        ),
        Example("[now()]", calls=[_NOW], tools=ALL),
    ],
    "olmo3": [
        Example('<function_calls>\nsearch(query="cats & dogs", limit=3)\nnow()\n</function_calls>', calls=[_SEARCH, _NOW]),
    ],
    "lfm2": [
        Example("Yes.<|tool_call_start|>[search(query='cats & dogs', limit=3)]<|tool_call_end|>", "Yes.", calls=[_SEARCH]),
        Example(
            "<|tool_call_start|>[sh(cmd='echo 'it is' | cat', n=-1, t='\\x41\\u00e9\\'')]<|tool_call_end|>",
            calls=[("sh", {"cmd": "echo 'it is' | cat", "n": -1, "t": "Aé'"}, None)],
        ),
    ],
    "mistral_pre_v11": [
        Example(
            '[TOOL_CALLS] [{"name": "now", "arguments": {}, "id": "abcdefghi"}, {"name": "search", "arguments": {"limit": 1}}]',
            calls=[("now", {}, "abcdefghi"), ("search", {"limit": 1}, None)],
        ),
    ],
    "mistral": [
        Example('Sure.[TOOL_CALLS]search[ARGS]{"query": "cats & dogs", "limit": 3}[TOOL_CALLS]now[ARGS]{}', "Sure.", calls=[_SEARCH, _NOW]),
        Example('[TOOL_CALLS]search[CALL_ID]123456789[ARGS]{"limit": 3}', calls=[("search", {"limit": 3}, "123456789")]),
        Example('[TOOL_CALLS] [{"name": "search", "arguments": {"limit": 3}}]', calls=[("search", {"limit": 3}, None)]),
        Example("[TOOL_CALLS] [1]", "[TOOL_CALLS] [1]"),
        Example('[TOOL_CALLS]search{"limit": 3}', calls=[("search", {"limit": 3}, None)]),
    ],
    "deepseek_v3": [
        Example(
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>search\n```json\n{"query": "cats & dogs", "limit": 3}\n```'
            "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            calls=[_SEARCH, _NOW],
        ),
    ],
    "deepseek_v31": [
        Example(
            'Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>search<｜tool▁sep｜>{"query": "cats & dogs", "limit": 3}<｜tool▁call▁end｜>'
            "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "Hm.",
            calls=[_SEARCH, _NOW],
        ),
    ],
    "deepseek_v32": [
        Example(
            '<｜DSML｜function_calls>\n<｜DSML｜invoke name="search">\n<｜DSML｜parameter name="query" string="true">cats & dogs'
            '</｜DSML｜parameter>\n<｜DSML｜parameter name="limit" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
            '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
            calls=[_SEARCH, _NOW],
        ),
    ],
    "kimi_k2": [
        Example(
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>"
            '{"query": "cats & dogs", "limit": 3}'
            "<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
            calls=[("search", _SEARCH[1], "functions.search:0"), ("now", {}, "functions.now:1")],
        ),
    ],
    "kimi_k3": [
        Example(
            '<|open|>response<|sep|>Hm.<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="search" index="1"<|sep|>'
            '<|open|>argument key="query" type="string"<|sep|>cats & dogs<|close|>argument<|sep|>'
            '<|open|>argument key="limit" type="number"<|sep|>3<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
            "Hm.",
            calls=[_SEARCH],
        ),
    ],
    "glm45": [
        Example(
            "Let me see.\n<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>cats & dogs</arg_value>\n<arg_key>limit</arg_key>\n"
            "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
            "Let me see.",
            calls=[_SEARCH, _NOW],
            tools=ALL,
        ),
        Example(
            "<tool_call>search<arg_key>query</arg_key><arg_value>7</arg_value></tool_call>",
            calls=[("search", {"query": "7"}, None)],
            tools=ALL,
        ),
        Example("<tool_call>f<arg_key>a</arg_key><arg_value>[1, 2]</arg_value></tool_call>", calls=[("f", {"a": [1, 2]}, None)]),
        Example(
            "<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>a</arg_value> b\n\n</arg_value></arg_value>\n</tool_call>",
            calls=[("search", {"query": "a</arg_value> b\n\n</arg_value>"}, None)],
            tools=ALL,
        ),
        Example("<tool_call>several words\nand lines</tool_call>", "<tool_call>several words\nand lines</tool_call>"),
    ],
    "granite": [Example(f'<|tool_call|>[{_SEARCH_JSON}, {{"name": "now", "arguments": {{}}}}]', calls=[_SEARCH, _NOW])],
    "granite-20b-fc": [
        Example(f'<function_call> {_SEARCH_JSON}\n<function_call> {{"name": "now", "arguments": {{}}}}', calls=[_SEARCH, _NOW])
    ],
    "phi4_mini_json": [
        Example(f'functools[{_SEARCH_JSON}, {{"name": "now", "arguments": {{}}}}]', calls=[_SEARCH, _NOW]),
        Example("Python's functools is a module", "Python's functools is a module"),
    ],
    "internlm": [
        Example(
            'Hm.<|action_start|><|plugin|>\n{"name": "search", "parameters": {"query": "cats & dogs", "limit": 3}}<|action_end|>',
            "Hm.",
            calls=[_SEARCH],
        )
    ],
    "jamba": [
        Example(f'<tool_calls>[\n  {{"name": "now", "arguments": {{}}}},\n  {_SEARCH_JSON}\n]</tool_calls>', calls=[_NOW, _SEARCH]),
    ],
    "xlam": [
        Example(f'[{{"name": "now", "arguments": {{}}}}, {_SEARCH_JSON}]', calls=[_NOW, _SEARCH], tools=ALL),
        Example(f"Calling:\n```json\n[{_WRITE_JSON}]\n```", "Calling:", calls=[_WRITE], tools=ALL),
        Example("```python\nprint(1)\n```", "```python\nprint(1)\n```", tools=ALL),
    ],
    "minimax_m2": [
        Example(
            '<minimax:tool_call>\n<invoke name="search">\n<parameter name="query">cats & dogs</parameter>\n'
            '<parameter name="limit">3</parameter>\n'
            '</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
            calls=[_SEARCH, _NOW],
            tools=ALL,
        ),
    ],
    "seed_oss": [Example(f"Hm.\n<seed:tool_call>\n{_QWEN_PLOT}\n</seed:tool_call>", "Hm.", calls=[_PLOT], tools=ALL)],
    "step3": [
        Example(
            '<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="search">'
            '<steptml:parameter name="query">'
            'cats & dogs</steptml:parameter><steptml:parameter name="limit">3</steptml:parameter></steptml:invoke><｜tool_call_end｜>\n'
            '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="now"></steptml:invoke><｜tool_call_end｜>\n'
            "<｜tool_calls_end｜>",
            calls=[_SEARCH, _NOW],
            tools=ALL,
        ),
    ],
    "minicpm5": [
        Example(
            '<function name="write_file"><param name="path">a.py</param>'
            '<param name="text"><![CDATA[if a < b:\n    print("{a}")\n]]></param>'
            "</function>",
            calls=[_WRITE],
            tools=ALL,
        ),
    ],
    "gemma4": [
        Example(
            'Hm.<|tool_call>call:search{query:<|"|>cats & dogs<|"|>,limit:3}<tool_call|><|tool_call>call:now{}<tool_call|>',
            "Hm.",
            calls=[_SEARCH, _NOW],
        ),
        Example(
            '<|tool_call>call:plot{points:[[1,2.5],[-3,4e2]],style:{color:<|"|>red<|"|>},scale:0.5,grid:true}<tool_call|>', calls=[_PLOT]
        ),
    ],
    "functiongemma": [
        Example("<start_function_call>call:search{query:<escape>cats & dogs<escape>,limit:3}<end_function_call>", calls=[_SEARCH]),
    ],
    "cohere_command3": [
        Example(
            '<|START_ACTION|>[\n {"tool_call_id": "0", "tool_name": "search", '
            '"parameters": {"query": "cats & dogs", "limit": 3}}\n]<|END_ACTION|>',
            calls=[("search", _SEARCH[1], "0")],
        ),
        Example("<|START_RESPONSE|>Hello<|END_RESPONSE|>", "Hello"),
    ],
    "cohere_command_r": [
        Example('Action:\n```json\n[{"tool_name": "search", "parameters": {"query": "cats & dogs", "limit": 3}}]\n```', calls=[_SEARCH]),
    ],
    "apertus": [
        Example('<|tools_prefix|>[{"search": {"query": "cats & dogs", "limit": 3}}, {"now": {}}]<|tools_suffix|>', calls=[_SEARCH, _NOW])
    ],
    "nemotron_json": [Example(f"Hm.\n<TOOLCALL>[{_SEARCH_JSON}]</TOOLCALL>", "Hm.", calls=[_SEARCH])],
    "longcat": [Example(f"<longcat_tool_call>{_SEARCH_JSON}</longcat_tool_call>", calls=[_SEARCH])],
    "gigachat3": [Example(f"Hm.<|function_call|>{_SEARCH_JSON}", "Hm.", calls=[_SEARCH])],
    "functionary_v31": [
        Example(
            'Hm.<function=search>{"query": "cats & dogs", "limit": 3}</function><function=now>{}</function>', "Hm.", calls=[_SEARCH, _NOW]
        )
    ],
    "openai": [
        Example("<|channel|>final<|message|>Hello", "Hello"),
        Example("Hello", "Hello"),
        Example(
            "<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant<|channel|>commentary to=functions.search <|constrain|>json"
            '<|message|>{"query": "cats & dogs", "limit": 3}<|call|>',
            reasoning="Look it up.",
            calls=[_SEARCH],
        ),
        Example(
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>"
            "<|start|>assistant<|channel|>final<|message|>c<|return|>",
            "c",
            "a\nb",
        ),
        Example(" to=functions.now<|channel|>commentary<|message|><|call|>", calls=[_NOW]),
    ],
}

REASONING_EXAMPLES: dict[str, list[Example]] = {
    "deepseek_r1": [Example("<think>Hm.</think>Yes", "Yes", "Hm."), Example("abc</think>def", "def", "abc"), Example("still", "", "still")],
    "olmo3": [Example("<think>Hm.</think>Yes", "Yes", "Hm.")],
    "qwen3": [
        Example("<think>\nHm.\n\nOK\n</think>\n\nYes, a <b> c", "Yes, a <b> c", "Hm.\n\nOK"),
        Example("<think>\n\n</think>\n\nYes", "Yes"),
        Example("<think>Hm. <tool_call>x", "<tool_call>x", "Hm."),
    ],
    "think": [Example("\n<think>Hm.</think>\nYes", "Yes", "Hm."), Example("Hm.\n</think>\n\nYes", "Yes", "Hm.")],
    "kimi_k2": [
        Example("<think>Hm.</think>Yes", "Yes", "Hm."),
        Example("Hm.<|tool_calls_section_begin|>", "<|tool_calls_section_begin|>", "Hm."),
    ],
    "lfm2": [Example("<think>Hm.</think>Yes", "Yes", "Hm."), Example("A <think> tag", "A <think> tag")],
    "minimax_m2_append_think": [Example("Hm.</think>Yes", "<think>Hm.</think>Yes")],
    "mistral": [Example("[THINK]Hm.[/THINK]Yes", "Yes", "Hm."), Example("A[THINK]b[/THINK]c[/THINK]d", "Acd", "b")],
    "granite": [Example("Here is my thought process: Hm.\nHere's my response: Yes", "Yes", "Hm."), Example("Here it is", "Here it is")],
    "granite33": [Example("<think>Hm.</think><response>Yes</response>", "Yes", "Hm.")],
    "ernie45": [Example("Hm.\n</think>\n\n<response>\nYes\n</response>\n", "Yes", "Hm."), Example("Hm.</think>Yes", "Yes", "Hm.")],
    "hunyuan_a13b": [Example("<think>\nHm.\n</think>\n<answer>\nYes\n</answer>", "Yes", "Hm."), Example("Yes <answer>", "Yes <answer>")],
    "seed_oss": [Example("<seed:think>Hm.</seed:think>Yes", "Yes", "Hm.")],
    "gemma4": [Example("<|channel>thought\nHm.<channel|>Yes", "Yes", "Hm."), Example("a<|channel>though<channel|>b", "ab", "though")],
    "cohere_command3": [Example("<|START_THINKING|>Hm.<|END_THINKING|>Yes", "Yes", "Hm.")],
    "openai_gptoss": [
        Example("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes<|return|>", "Yes", "Hm."),
    ],
}
