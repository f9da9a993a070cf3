"""What requests say about the form of their output: `structured_outputs` (vLLM's field) and `response_format` (OpenAI's)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from jaxllm.errors import InvalidRequestError
from jaxllm.sampling_params import ReasoningMarks, SamplingParams, StructuredOutputsParams
from jaxllm.server.parsers import ReasoningFormat, opens_reasoning
from jaxllm.server.protocol import GenerationRequest

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


def after_reasoning(params: SamplingParams, form: ReasoningFormat | None, prompt: str | None, *, continues: bool) -> SamplingParams:
    """`params` with a constraint that begins behind the model's reasoning, where it reasons: what is constrained is the answer."""
    constraint = params.structured_outputs
    if constraint is None or form is None or not form.ends or prompt is None:
        return params
    is_open = opens_reasoning(prompt, form, continues=continues)
    if not is_open and prompt.rstrip().endswith(form.ends):
        # The template has closed it at once: thinking is off.
        return params
    marks = ReasoningMarks(starts=list(form.starts), ends=list(form.ends), is_open=is_open, newlines=form.strip)
    return params.clone(structured_outputs=msgspec.structs.replace(constraint, after_reasoning=marks))


def constraint_field(request: GenerationRequest) -> str:
    """The name that the client gave its constraint: errors speak of it."""
    return "response_format" if request.structured_outputs is None else "structured_outputs"


def _of_response_format(given: Mapping[str, Any] | None) -> StructuredOutputsParams | None:
    kind = "text" if given is None else given.get("type")
    if given is None or kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind == "json_schema":
        return StructuredOutputsParams(json=_schema(given.get("json_schema")))
    if kind == "structural_tag":
        return StructuredOutputsParams(structural_tag={name: value for name, value in given.items() if name != "type"})
    raise InvalidRequestError(
        f"response_format.type must be one of {', '.join(_FORMATS)}; got {kind!r:.100}", param="response_format", value=kind
    )


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
