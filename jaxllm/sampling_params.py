"""What a user may ask of the sampler: the fields, defaults and ranges of vLLM's `SamplingParams`."""

from __future__ import annotations

import enum
import functools
import re
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from jaxllm.errors import InvalidRequestError

MAX_N_SEQUENCES = 16_384
MAX_LOGPROB_TOKEN_IDS = 128
# Rows of the sampler's per-request table: entries of logit_bias and single-token bans together.
MAX_LOGIT_BIAS_ENTRIES = 1024
# Token sequences that `bad_words` may come to, each word counted with and without a leading space.
MAX_BAD_WORD_SEQUENCES = 128
MAX_BAD_WORD_CHARS = 1024
MAX_STOP_CHARS = 4096
GREEDY_BELOW = 1e-5
LOWEST_TEMPERATURE = 0.01
LOGIT_BIAS_LIMIT = 100.0


TokenId = Annotated[int, Meta(ge=0)]
Text = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]


def check_fields(params: msgspec.Struct, within: str = "") -> None:
    """Check every field against its annotation, which nobody does where a struct is made by hand.

    Args:
        within: the field that the struct is the value of, if any.

    Raises:
        InvalidRequestError: one is of another type or out of its range.
    """
    try:
        msgspec.convert(params, _plain_twin(type(params)), from_attributes=True)
    except msgspec.ValidationError as error:
        raise refused(error, msgspec.structs.asdict(params), within) from None


def refused(error: msgspec.ValidationError, fields: Mapping[str, Any], within: str = "") -> InvalidRequestError:
    """What msgspec found wrong with one of `fields`, in our words."""
    wanted, _, where = str(error).partition(" - at ")
    found = re.search(r"\$\.(\w+)([^`]*)", where)
    name, inside = (found[1], found[2]) if found is not None else ("", "")
    value = fields.get(name)
    # The repr of a huge list would cost more than the request.
    got = f"{len(value)} items" if isinstance(value, list | dict | tuple) else f"{value!r:.200}"
    wanted = wanted.removeprefix("Expected ").partition(", got")[0].replace("`", "")
    shown = f"{within}.{name}{inside}" if within else name + inside
    return InvalidRequestError(f"{shown} must be {wanted}, got {got}", param=within or name)


@functools.cache
def _plain_twin(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """A struct of the same fields that does nothing else when it is made."""
    return msgspec.defstruct(kind.__name__, [(field.name, field.type) for field in msgspec.structs.fields(kind)])


class RequestOutputKind(enum.IntEnum):
    """What each output of a stream carries."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class ReasoningMarks(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Reasoning that comes before the answer: free text up to one of `ends`, after one of `starts`.

    `is_open`: the prompt holds the start already, so the reasoning must come; else it may. `newlines`: up to two may follow it, which
    whoever reads the answer leaves out. `anywhere`: it may come again later. `implied_ends`: what belongs to the answer, and ends it too.
    `closing`: what ends it where it must.
    """

    starts: list[str]
    ends: list[str]
    is_open: bool = False
    newlines: bool = False
    anywhere: bool = False
    implied_ends: list[str] = []
    closing: str = ""

    # Filled in by the input processor: the tokens of `closing`.
    closing_ids: list[int] = []


class StructuredOutputsParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What the output must look like. Exactly one of the first six is set.

    json: a JSON schema, as an object or as text. regex: a regular expression that the whole output matches. choice: the output is one of
    these strings. grammar: a context-free grammar, Lark or GBNF. json_object: any JSON object. structural_tag: free text with
    constrained parts, as an object or as text.

    Of JSON: `whitespace_pattern` is a regular expression of the whitespace that may stand between two tokens (by default a space, or a
    newline and an indentation); `disable_any_whitespace` allows none; `disable_additional_properties` closes objects that name their
    properties and do not say whether there may be others.

    Raises:
        InvalidRequestError: none or several are set, or one is of a wrong type. Schemas and grammars are read where a request is accepted.
    """

    json: dict[str, Any] | str | bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    # Set by the server where the model reasons first, never by users.
    after_reasoning: ReasoningMarks | None = None

    def __post_init__(self) -> None:
        given = [name for name in STRUCTURED_OUTPUT_KINDS if self._is_given(name)]
        if len(given) != 1:
            raise InvalidRequestError(
                f"structured_outputs must set exactly one of {', '.join(STRUCTURED_OUTPUT_KINDS)}; got {' and '.join(given) or 'none'}",
                param="structured_outputs",
            )
        check_fields(self, "structured_outputs")
        about_json = self.json is not None or self.json_object
        for name in ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"):
            if getattr(self, name) and not about_json:
                raise InvalidRequestError(
                    f"structured_outputs.{name} belongs to json and json_object; it means nothing for {given[0]}",
                    param="structured_outputs",
                )
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise InvalidRequestError(
                "structured_outputs.disable_any_whitespace and whitespace_pattern exclude each other; send one", param="structured_outputs"
            )

    @property
    def kind(self) -> str:
        """The one of `STRUCTURED_OUTPUT_KINDS` that is set."""
        return next(name for name in STRUCTURED_OUTPUT_KINDS if self._is_given(name))

    def _is_given(self, name: str) -> bool:
        value = getattr(self, name)
        return value is not None and not (name == "json_object" and value is False)


STRUCTURED_OUTPUT_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True, dict=False):
    """Sampling parameters of one request. Names, defaults and ranges are vLLM's.

    Raises:
        InvalidRequestError: a field is out of its range; the message names the field and the value.
    """

    n: Annotated[int, Meta(ge=1, le=MAX_N_SEQUENCES)] = 1
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=sys.float_info.max)] = 1.0
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    # 0 and -1 turn it off.
    top_k: Annotated[int, Meta(ge=-1)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Annotated[str, Meta(max_length=MAX_STOP_CHARS)] | list[Text] | None = None
    stop_token_ids: list[TokenId] | None = None
    bad_words: (
        Annotated[list[Annotated[str, Meta(min_length=1, max_length=MAX_BAD_WORD_CHARS)]], Meta(max_length=MAX_BAD_WORD_SEQUENCES)] | None
    ) = None
    ignore_eos: bool = False
    max_tokens: Annotated[int, Meta(ge=1)] | None = 16
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    # -1: all.
    logprobs: Annotated[int, Meta(ge=-1)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=-1)] | None = None
    logprob_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_LOGPROB_TOKEN_IDS)] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logit_bias: Annotated[dict[int, Finite], Meta(max_length=MAX_LOGIT_BIAS_ENTRIES)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1)] | None = None
    # -1: the model's maximum.
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    # -1: any number.
    thinking_token_budget: Annotated[int, Meta(ge=-1)] | None = None

    # Set by the server where the model's reasoning is known, never by users.
    reasoning_marks: ReasoningMarks | None = None

    # Filled in by the input processor, never by users: token sequences of `bad_words`, every id that ends the request, and the grammar
    # (in llguidance's notation) that `structured_outputs` comes to.
    bad_words_token_ids: list[list[int]] | None = None
    eos_token_ids: list[int] = []
    output_grammar: str | None = None

    def __post_init__(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is True:
                setattr(self, name, 1)
        self.verify()
        self.stop = [self.stop] if isinstance(self.stop, str) else list(self.stop or ())
        self.stop_token_ids = list(dict.fromkeys(self.stop_token_ids or ()))
        self.allowed_token_ids = list(dict.fromkeys(self.allowed_token_ids)) if self.allowed_token_ids else self.allowed_token_ids
        self.bad_words = list(self.bad_words or ())
        self.seed = None if self.seed == -1 else self.seed
        self.thinking_token_budget = None if self.thinking_token_budget == -1 else self.thinking_token_budget
        if self.is_greedy:
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0
        elif self.temperature < LOWEST_TEMPERATURE:
            self.temperature = LOWEST_TEMPERATURE
        if self.logit_bias is not None:
            self.logit_bias = {token: max(-LOGIT_BIAS_LIMIT, min(LOGIT_BIAS_LIMIT, float(bias))) for token, bias in self.logit_bias.items()}

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def needs_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    def clone(self, **changes: Any) -> SamplingParams:
        """A validated copy with `changes` applied."""
        return msgspec.structs.replace(self, **changes)

    def verify(self) -> None:
        """Check every field that can be checked without the model. Raises InvalidRequestError."""
        check_fields(self)
        # msgspec takes a dict for a struct.
        if isinstance(self.structured_outputs, dict):
            raise InvalidRequestError("structured_outputs must be StructuredOutputsParams, got dict", param="structured_outputs")
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequestError("truncate_prompt_tokens must be at least 1, or -1, got 0", param="truncate_prompt_tokens")
        if self.is_greedy and self.n > 1:
            raise InvalidRequestError(
                f"n must be 1 when sampling greedily (temperature 0), got {self.n}; raise temperature or send n=1", param="n"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(f"min_tokens must not exceed max_tokens={self.max_tokens}, got {self.min_tokens}", param="min_tokens")
        if self.stop and not self.detokenize:
            raise InvalidRequestError("stop strings need detokenize=true", param="stop")


class BeamSearchParams(msgspec.Struct, kw_only=True):
    """Parameters of `LLM.beam_search`; `length_penalty` is the exponent of the length in a beam's score."""

    beam_width: Annotated[int, Meta(ge=1, le=128)]
    max_tokens: Annotated[int, Meta(ge=1)]
    ignore_eos: bool = False
    temperature: Annotated[float, Meta(ge=0, le=2)] = 0.0
    length_penalty: Finite = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
