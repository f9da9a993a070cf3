"""What a format's grammar lets through is what its parser reads, and fits the tools of the request."""

from __future__ import annotations

import pytest

from jaxllm.server.parsers import TOOL_FORMATS, ToolFormat
from jaxllm.server.parsers.functions import Function, InexpressibleError
from jaxllm.server.parsers.grammar import PLAIN_CALLS, calls_grammar, calls_or_body_grammar, calls_or_text_grammar
from jaxllm.text.grammar import checked_schema
from jaxllm.text.grammar_compiler import GrammarCompiler
from tests.checkpoints import script_ids
from tests.server.fake_engine import EOS, VOCAB, load_test_tokenizer
from tests.server.parsers.examples import ALL, TOOL_EXAMPLES

NAMES = {tool["function"]["name"] for tool in ALL}
# In examples that parsers put right, and grammars need not allow; or that are written as older models of the family do.
_UNUSUAL = (
    '{"name": "now"}', '{"arguments"', '"arguments": "', "}}}", "+3", "=cats", "points=[(", "{'color'", "[CALL_ID]", "[TOOL_CALLS] [{",
    'h{"limit"', " to=functions.now<", "\na\n<parameter", "Calling:", '"x"}\n<',
)  # fmt: skip


def function(name: str, strict: bool = True, required: tuple[str, ...] = (), **properties: object) -> Function:
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return Function(name, checked_schema("json", schema), strict=strict)


FUNCTIONS = [Function(tool["function"]["name"], checked_schema("json", tool["function"]["parameters"])) for tool in ALL]
TWO = [function("f", required=("a",), a={"type": "integer"}, b={"type": "string"}), function("g")]


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    return GrammarCompiler(load_test_tokenizer(tmp_path_factory.mktemp("tokenizer")), VOCAB)


def accepts(compiler: GrammarCompiler, lark: str, text: str) -> bool:
    """Whether a text is a whole sentence of the grammar."""
    from llguidance import LLMatcher

    matcher = compiler.submit(LLMatcher.grammar_from_lark(lark), [EOS]).result()
    ids = script_ids(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def usual(name: str) -> list[str]:
    """Outputs of the format's examples that call functions of ours as models write them."""
    examples = [example for example in TOOL_EXAMPLES[name] if example.calls and {call[0] for call in example.calls} <= NAMES]
    return [example.output.removesuffix("<|call|>") for example in examples if not any(word in example.output for word in _UNUSUAL)]


@pytest.mark.parametrize("name", sorted(set(TOOL_EXAMPLES) - {"mistral_pre_v11", "seed_oss"}))
def test_what_models_write_fits_the_grammar(compiler: GrammarCompiler, name: str) -> None:
    free = calls_or_text_grammar(TOOL_FORMATS[name], FUNCTIONS, {}, several=True)
    assert accepts(compiler, free, usual(name)[0])
    assert accepts(compiler, free, "<|channel|>final<|message|>Hello" if name == "openai" else "Hello, <no> {call}.")


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        (
            TOOL_FORMATS["hermes"],
            ['<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', '<tool_call>{"name": "g", "arguments": {}}</tool_call>'],
            [
                '<tool_call>{"name": "h", "arguments": {}}</tool_call>',
                '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
                '<tool_call>{"name": "f", "arguments": {"a": "1"}}</tool_call>',
                '<tool_call>{"name": "g", "arguments": {"x": 1}}</tool_call>',
                "Hello",
            ],
        ),
        (
            TOOL_FORMATS["qwen3_coder"],
            ["<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx < y\n</parameter>\n</function>\n</tool_call>"],
            [
                "<tool_call>\n<function=f>\n<parameter=b>\nx\n</parameter>\n</function>\n</tool_call>",
                "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>",
            ],
        ),
        (
            TOOL_FORMATS["pythonic"],
            ["[f(a=1)]", "[f(a=1, b='x'), g()]", '[g(), f(a=2,b="x")]'],
            ["[f()]", "[f(b='x')]", "[f(a=1,)]", "[h()]", "[]"],
        ),
        (
            TOOL_FORMATS["openai"],
            [
                '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}',
                "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.g<|message|>{}",
            ],
            ["<|channel|>final<|message|>Hello", "<|channel|>commentary to=functions.f<|message|>{}"],
        ),
        (
            PLAIN_CALLS,
            ['[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}]'],
            ["[]", '{"name": "g", "parameters": {}}'],
        ),
    ],
    ids=lambda value: value.name if isinstance(value, ToolFormat) else "",
)
def test_calls_are_those_of_the_request(compiler: GrammarCompiler, form: ToolFormat, good: list[str], bad: list[str]) -> None:
    lark = calls_grammar(form, TWO, {}, several=True)
    assert [text for text in good if not accepts(compiler, lark, text)] == []
    assert [text for text in bad if accepts(compiler, lark, text)] == []


@pytest.mark.parametrize("name", sorted(set(TOOL_EXAMPLES) - {"mistral_pre_v11", "seed_oss"}))
def test_one_call_where_no_more_may_come(compiler: GrammarCompiler, name: str) -> None:
    several = [example.output for example in TOOL_EXAMPLES[name] if len(example.calls) > 1 and example.output in usual(name)]
    lark = calls_or_text_grammar(TOOL_FORMATS[name], FUNCTIONS, {}, several=False)
    assert [text for text in several if accepts(compiler, lark, text)] == []


def test_the_answer_is_a_call_or_what_was_asked_for(compiler: GrammarCompiler) -> None:
    body = 'start: "yes" | "no"'
    lark = calls_or_body_grammar(TOOL_FORMATS["hermes"], TWO, {}, several=True, body=body)
    assert accepts(compiler, lark, "yes")
    assert accepts(compiler, lark, '<tool_call>{"name": "g", "arguments": {}}</tool_call>')
    assert not accepts(compiler, lark, "maybe")
    harmony = calls_or_body_grammar(TOOL_FORMATS["openai"], [], {}, several=True, body=body)
    assert accepts(compiler, harmony, "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>no")
    assert not accepts(compiler, harmony, "no")


def test_descriptions_never_change_the_grammar() -> None:
    described = {
        "type": "string",
        "example": {"type": 5},
        "description": '"quotes" \\ {braces} \n line 😀 <tool_call> ' + "x" * 5000,
        "title": "A",
    }
    plain = calls_grammar(PLAIN_CALLS, [function("f", a={"type": "string"}, title={"type": "integer"})], {}, several=True)
    assert calls_grammar(PLAIN_CALLS, [function("f", a=described, title={"type": "integer"})], {}, several=True) == plain
    assert '"title"' in plain


@pytest.mark.parametrize(
    ("form", "schema"), [("qwen3_coder", {"type": "string", "pattern": "a+"}), ("gemma4", {"type": "string", "pattern": "a+"})]
)
def test_what_a_format_cannot_hold_to_is_known(form: str, schema: dict[str, object]) -> None:
    with pytest.raises(InexpressibleError):
        calls_or_text_grammar(TOOL_FORMATS[form], [function("f", a=schema)], {}, several=True)
    assert calls_or_text_grammar(TOOL_FORMATS[form], [function("f", strict=False, a=schema)], {}, several=True)


@pytest.mark.parametrize("name", ["pythonic", "olmo3", "lfm2", "llama4_pythonic"])
def test_a_value_of_several_types_is_written_as_in_python_or_in_json(compiler: GrammarCompiler, name: str) -> None:
    form = TOOL_FORMATS[name]
    lark = calls_grammar(form, [function("f", required=("a",), a={"type": ["boolean", "integer", "null"]})], {}, several=True)
    for value, fits in (("True", True), ("None", True), ("null", True), ("3", True), ("'x'", False)):
        call = f"{form.opens[0]}f(a={value}){form.closes[0]}" if name == "olmo3" else f"[f(a={value})]"
        assert accepts(compiler, lark, (form.opens[0] + call + form.closes[0]) if name == "lfm2" else call) == fits, value


@pytest.mark.parametrize("name", ["gemma4", "functiongemma"])
@pytest.mark.parametrize(
    "schema", [{"type": "array", "items": [{"type": "integer"}]}, {"type": "array", "items": False}, {"anyOf": [True]}]
)
def test_what_a_notation_has_no_words_for_is_known(name: str, schema: dict[str, object]) -> None:
    with pytest.raises(InexpressibleError):
        calls_grammar(TOOL_FORMATS[name], [function("f", a=schema)], {}, several=True)
    assert calls_or_text_grammar(TOOL_FORMATS[name], [function("f", strict=False, a=schema)], {}, several=True)


@pytest.mark.parametrize(("name", "quote"), [("gemma4", '<|"|>'), ("functiongemma", "<escape>")])
def test_a_notation_holds_to_what_schemas_refer_to(compiler: GrammarCompiler, name: str, quote: str) -> None:
    tree = {"properties": {"n": {"type": "integer", "minimum": 3}, "next": {"anyOf": [{"$ref": "#/$defs/T"}, {"type": "null"}]}}}
    schema = {"type": "object", "properties": {"t": {"$ref": "#/$defs/T"}, "o": {"type": "object"}}, "$defs": {"T": tree}}
    form = TOOL_FORMATS[name]
    lark = calls_grammar(form, [Function("f", checked_schema("json", schema))], {}, several=False)
    for given, fits in (("{t:{n:3,next:{n:4,next:null}},o:{a:1}}", True), ("{t:{n:2}}", False), ("{t:{next:3}}", False), ("{o:3}", False)):
        assert accepts(compiler, lark, f"{form.opens[0]}call:f{given}{form.closes[0]}") == fits, given
    assert accepts(compiler, lark, f"{form.opens[0]}call:f{{o:{{a:{quote}x{quote}}}}}{form.closes[0]}")


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "gemma4", "pythonic"])
def test_one_of_a_few_values_may_be_referred_to_and_may_be_null(compiler: GrammarCompiler, name: str) -> None:
    kinds = {"E": {"enum": ["red", "dark red"], "type": "string"}}
    properties = {"a": {"$ref": "#/$defs/E"}, "b": {"anyOf": [{"$ref": "#/$defs/E"}, {"type": "null"}]}}
    schema = {"type": "object", "properties": properties, "required": ["a", "b"], "$defs": kinds}
    lark = calls_or_text_grammar(TOOL_FORMATS[name], [Function("f", checked_schema("json", schema))], {}, several=False)
    written = {
        "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n<parameter=b>\n{}\n</parameter>\n"
        "</function>\n</tool_call>",
        "glm45": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{}</arg_value>\n<arg_key>b</arg_key>\n"
        "<arg_value>{}</arg_value>\n</tool_call>",
        "gemma4": "<|tool_call>call:f{{a:{},b:{}}}<tool_call|>",
        "pythonic": "[f(a={}, b={})]",
    }[name]
    quote = {"gemma4": '<|"|>', "pythonic": '"'}.get(name, "")
    for a, b, fits in (("red", "null", True), ("dark red", "red", True), ("null", "red", False), ("red", "blue", False)):
        call = written.format(*(value if value == "null" else quote + value + quote for value in (a, b)))
        assert accepts(compiler, lark, call) == fits, call


def test_special_tokens_are_no_text(compiler: GrammarCompiler) -> None:
    from llguidance import LLMatcher

    form, special = TOOL_FORMATS["kimi_k3"], {"<|sep|>": 5, "<|close|>": 6, "<|open|>": 7}
    lark = calls_grammar(form, [function("f", b={"type": "string"})], special, several=False)
    matcher = compiler.submit(LLMatcher.grammar_from_lark(lark), [EOS]).result()
    ids = [7, *script_ids("tools"), 5, 7, *script_ids('call tool="f" index="1"'), 5, 7, *script_ids('argument key="b" type="string"'), 5]
    ids += [*script_ids("<|close|>x"), 6, *script_ids("argument"), 5, 6, *script_ids("call"), 5, 6, *script_ids("tools"), 5]
    assert matcher.try_consume_tokens(ids) == len(ids)
    assert matcher.is_accepting()
