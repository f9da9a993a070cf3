"""What requests say about the form of their output: `structured_outputs` (vLLM's field) and `response_format` (OpenAI's)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from jaxllm.errors import InvalidRequestError, NotSupportedError
from jaxllm.sampling_params import ReasoningMarks, SamplingParams, StructuredOutputsParams
from jaxllm.server.output_formats import HARMONY_CALLS, HARMONY_REASONING, OutputFormats
from jaxllm.server.parsers import ReasoningFormat, ToolFormat, opens_reasoning
from jaxllm.server.parsers.functions import InexpressibleError
from jaxllm.server.parsers.grammar import PLAIN_CALLS, calls_grammar, calls_or_body_grammar, calls_or_text_grammar
from jaxllm.server.protocol import GenerationRequest
from jaxllm.server.tools import ToolChoice
from jaxllm.text.grammar import closed_where_safe, lark_of

if TYPE_CHECKING:
    from jaxllm.server.answers import AnswerPlan

_FIELDS = tuple(field.name for field in msgspec.structs.fields(StructuredOutputsParams) if field.name != "after_reasoning")
_FORMATS = ("text", "json_object", "json_schema", "structural_tag")


def structured_outputs(request: GenerationRequest) -> StructuredOutputsParams | None:
    """The request's constraint, or None.

    Raises:
        InvalidRequestError: both fields ask for one, or one of them is wrong.
    """
    by_format = _of_response_format(request.response_format)
    if request.structured_outputs is None:
        return by_format
    if by_format is not None:
        raise InvalidRequestError("structured_outputs and response_format both constrain the output; send one", param="structured_outputs")
    unknown = [name for name in request.structured_outputs if name not in _FIELDS]
    if unknown:
        raise InvalidRequestError(
            f"structured_outputs has no field {unknown[0]!r:.100}; it has {', '.join(_FIELDS)}", param="structured_outputs"
        )
    given = {name: value for name, value in request.structured_outputs.items() if value is not None}
    return StructuredOutputsParams(**given)


def with_calls(
    asked: StructuredOutputsParams | None, choice: ToolChoice, formats: OutputFormats, *, continues: bool
) -> tuple[StructuredOutputsParams | None, ToolFormat | None]:
    """The constraint of an answer that `asked` constrains and that may or must be calls, and the format in which these will come.

    Raises:
        InvalidRequestError: the parameters of a tool are no schema, or such as cannot be kept to.
    """
    form = HARMONY_CALLS if formats.are_harmony else formats.tools
    special, several = formats.special_ids, choice.several
    if choice.mode == "required":
        functions = choice.functions()
        try:
            grammar = calls_grammar(form or PLAIN_CALLS, functions, special, several=several)
        except InexpressibleError as error:
            if formats.are_harmony:
                raise NotSupportedError(f"the model cannot be made to call: {error}", param="tools") from error
            form, grammar = None, calls_grammar(PLAIN_CALLS, functions, special, several=several)
        return StructuredOutputsParams(grammar=grammar), form or PLAIN_CALLS
    if choice.mode == "auto" and form is not None and (choice.wants_grammar or asked is not None):
        try:
            if asked is None:
                grammar = calls_or_text_grammar(form, choice.functions(), special, several=several)
            else:
                grammar = calls_or_body_grammar(form, choice.functions(), special, several=several, body=lark_of(asked))
        except InexpressibleError as error:
            raise NotSupportedError(
                f"the model's calls cannot be held to what tools and the rest of the request ask for: {error}; leave out strict, "
                'or send tool_choice "required"',
                param="tools",
            ) from error
        return StructuredOutputsParams(grammar=grammar), form
    if asked is not None and formats.are_harmony and not continues:
        grammar = calls_or_body_grammar(HARMONY_CALLS, (), special, several=False, body=lark_of(asked))
        return StructuredOutputsParams(grammar=grammar), None
    return asked, form if choice.mode == "auto" else None


def with_reasoning(params: SamplingParams, plan: AnswerPlan, prompt: str | None, *, continues: bool) -> SamplingParams:
    """`params` for a model that reasons first: what is constrained is the answer behind it, and a budget of thinking has an end to force.

    Raises:
        NotSupportedError: a budget, where reasoning is not read or has no end.
    """
    form, budget = plan.reasoning, params.thinking_token_budget
    marks = None if form is None or prompt is None else _marks(form, plan.choice, prompt, continues=continues)
    if budget is not None and marks is None:
        raise NotSupportedError(
            "thinking_token_budget needs a model whose reasoning is read and ends with a mark; start the server with --reasoning-parser",
            param="thinking_token_budget",
        )
    if marks is None or form is None:
        return params
    changes: dict[str, Any] = {"reasoning_marks": marks} if budget is not None else {}
    constraint = params.structured_outputs
    # A template may have closed it at once: thinking is off. The grammars of harmony have reasoning in them.
    closed = not marks.is_open and (prompt or "").rstrip().endswith(tuple(marks.ends))
    if constraint is not None and form.ends and not closed:
        changes["structured_outputs"] = msgspec.structs.replace(constraint, after_reasoning=marks)
    return params.clone(**changes) if changes else params


def _marks(form: ReasoningFormat, choice: ToolChoice, prompt: str, *, continues: bool) -> ReasoningMarks | None:
    """Where reasoning of this format begins and ends; None where it has no marks."""
    if form is HARMONY_REASONING:
        behind = {"none": "final<|message|>", "auto": "", "required": "commentary to=functions."}[choice.mode]
        closing = f"<|end|><|start|>assistant<|channel|>{behind}"
        return ReasoningMarks(starts=["<|channel|>analysis<|message|>"], ends=["<|end|>"], anywhere=True, closing=closing)
    if not form.ends:
        return None
    return ReasoningMarks(
        starts=list(form.starts),
        ends=list(form.ends),
        is_open=opens_reasoning(prompt, form, continues=continues),
        newlines=form.strip,
        anywhere=form.anywhere,
        implied_ends=list(form.implied_ends),
        closing=form.ends[0],
    )


def constraint_field(request: GenerationRequest) -> str:
    """The name that the client gave its constraint: errors speak of it."""
    if request.structured_outputs is None and request.response_format is None:
        return "tools"
    return "response_format" if request.structured_outputs is None else "structured_outputs"


def _of_response_format(given: Mapping[str, Any] | None) -> StructuredOutputsParams | None:
    kind = "text" if given is None else given.get("type")
    if given is None or kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind == "json_schema":
        return StructuredOutputsParams(json=closed_where_safe(_schema(given.get("json_schema"))))
    if kind == "structural_tag":
        return StructuredOutputsParams(structural_tag={name: value for name, value in given.items() if name != "type"})
    raise InvalidRequestError(f"response_format.type must be one of {', '.join(_FORMATS)}; got {kind!r:.100}", param="response_format")


def _schema(given: Any) -> Any:
    """The schema is held to whether `strict` is set or not."""
    if not isinstance(given, Mapping):
        raise InvalidRequestError(
            f"response_format.json_schema must be an object with name and schema, got {given!r:.100}", param="response_format"
        )
    schema = given.get("schema")
    if not isinstance(schema, dict | bool):
        raise InvalidRequestError(
            f"response_format.json_schema.schema must be a JSON schema (an object), got {schema!r:.100}", param="response_format"
        )
    return schema
