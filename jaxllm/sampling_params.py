"""What a user may ask of the sampler: the fields, defaults and ranges of vLLM's `SamplingParams`."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from typing import Any

import msgspec

from jaxllm.errors import InvalidRequestError

MAX_N_SEQUENCES = 16_384
MAX_LOGPROB_TOKEN_IDS = 128
# Rows of the sampler's per-request table: entries of logit_bias and single-token bans together.
MAX_LOGIT_BIAS_ENTRIES = 1024
# Token sequences that `bad_words` may come to, each word counted with and without a leading space.
MAX_BAD_WORD_SEQUENCES = 128
MAX_BAD_WORD_CHARS = 1024
GREEDY_BELOW = 1e-5
LOWEST_TEMPERATURE = 0.01
LOGIT_BIAS_LIMIT = 100.0


class RequestOutputKind(enum.IntEnum):
    """What each output of a stream carries."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class ReasoningMarks(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Reasoning that comes before the answer: free text up to one of `ends`, after one of `starts`.

    `is_open`: the prompt holds the start already, so the reasoning must come; else it may. `newlines`: up to two may follow it, which
    whoever reads the answer leaves out. `anywhere`: it may come again later. `closing`: what ends it where it must.
    """

    starts: list[str]
    ends: list[str]
    is_open: bool = False
    newlines: bool = False
    anywhere: bool = False
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

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
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
        for name, kinds, wanted in _STRUCTURED_TYPES:
            value = getattr(self, name)
            if value is not None and not isinstance(value, kinds):
                self._refuse(name, wanted, value)
        if self.choice is not None and (not self.choice or not all(isinstance(item, str) for item in self.choice)):
            self._refuse("choice", "a list of at least one string", self.choice)
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

    @staticmethod
    def _refuse(name: str, wanted: str, value: Any) -> None:
        raise InvalidRequestError(f"structured_outputs.{name} must be {wanted}, got {value!r:.200}", param="structured_outputs")


STRUCTURED_OUTPUT_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_STRUCTURED_TYPES: tuple[tuple[str, Any, str], ...] = (
    ("json", (dict, str, bool), "a JSON schema: an object, or its text"),
    ("regex", str, "a string"),
    ("choice", (list, tuple), "a list of at least one string"),
    ("grammar", str, "a string"),
    ("json_object", bool, "true or false"),
    ("structural_tag", (dict, str), "an object, or its text"),
    ("disable_any_whitespace", bool, "true or false"),
    ("disable_additional_properties", bool, "true or false"),
    ("whitespace_pattern", str, "a string"),
)


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True, dict=False):
    """Sampling parameters of one request. Names, defaults and ranges are vLLM's.

    Raises:
        InvalidRequestError: a field is out of its range; the message names the field and the value.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    truncate_prompt_tokens: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    thinking_token_budget: int | None = None

    # Set by the server where the model's reasoning is known, never by users.
    reasoning_marks: ReasoningMarks | None = None

    # Filled in by the input processor, never by users: token sequences of `bad_words`, every id that ends the request, and the grammar
    # (in llguidance's notation) that `structured_outputs` comes to.
    bad_words_token_ids: list[list[int]] | None = None
    eos_token_ids: list[int] = []
    output_grammar: str | None = None

    def __post_init__(self) -> None:
        self._normalise()
        self.verify()

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def needs_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    def clone(self, **changes: Any) -> SamplingParams:
        """A validated copy with `changes` applied."""
        return msgspec.structs.replace(self, **changes)

    def _normalise(self) -> None:
        self.stop = [self.stop] if isinstance(self.stop, str) else list(self.stop or ())
        self.stop_token_ids = list(dict.fromkeys(self.stop_token_ids or ()))
        self.bad_words = list(self.bad_words or ())
        if self.seed == -1:
            self.seed = None
        if self.thinking_token_budget == -1:
            self.thinking_token_budget = None
        if self.logprobs is True:
            self.logprobs = 1
        if self.prompt_logprobs is True:
            self.prompt_logprobs = 1
        if isinstance(self.temperature, (int, float)) and GREEDY_BELOW <= self.temperature < LOWEST_TEMPERATURE:
            self.temperature = LOWEST_TEMPERATURE
        if isinstance(self.temperature, (int, float)) and self.is_greedy and self.temperature >= 0:
            self._check_probabilities()
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0

    def verify(self) -> None:
        """Check every field that can be checked without the model. Raises InvalidRequestError."""
        _require_int("n", self.n, lambda v: 1 <= v <= MAX_N_SEQUENCES, f"an integer from 1 to {MAX_N_SEQUENCES}")
        for name in ("presence_penalty", "frequency_penalty"):
            _require_number(name, getattr(self, name), lambda v: -2 <= v <= 2, "a number from -2 to 2")
        _require_number("repetition_penalty", self.repetition_penalty, lambda v: v > 0, "a finite number above 0")
        _require_number("temperature", self.temperature, lambda v: 0 <= v <= 2, "a number from 0 to 2")
        self._check_probabilities()
        if self.is_greedy and self.n > 1:
            raise InvalidRequestError(
                f"n must be 1 when sampling greedily (temperature 0), got {self.n}; raise temperature or send n=1", param="n"
            )
        if self.seed is not None:
            _require_int("seed", self.seed, lambda v: -(2**63) <= v < 2**63, "a 64-bit integer")
        if self.max_tokens is not None:
            _require_int("max_tokens", self.max_tokens, lambda v: v >= 1, "an integer of at least 1, or null")
        _require_int("min_tokens", self.min_tokens, lambda v: v >= 0, "an integer of at least 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(f"min_tokens must not exceed max_tokens={self.max_tokens}, got {self.min_tokens}", param="min_tokens")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _require_int(name, getattr(self, name), lambda v: v >= -1, "an integer of at least 0, or -1 for all")
        if self.thinking_token_budget is not None:
            _require_int("thinking_token_budget", self.thinking_token_budget, lambda v: v >= 0, "an integer of at least 0, or -1 for none")
        self._check_lists()
        if self.structured_outputs is not None and not isinstance(self.structured_outputs, StructuredOutputsParams):
            raise InvalidRequestError(
                f"structured_outputs must be StructuredOutputsParams, got {type(self.structured_outputs).__name__}",
                param="structured_outputs",
            )
        if self.truncate_prompt_tokens is not None:
            _require_int(
                "truncate_prompt_tokens",
                self.truncate_prompt_tokens,
                lambda v: v == -1 or v >= 1,
                "an integer of at least 1, or -1 for the model's maximum",
            )

    def _check_probabilities(self) -> None:
        _require_number("top_p", self.top_p, lambda v: 0 < v <= 1, "a number above 0 and at most 1")
        _require_int("top_k", self.top_k, lambda v: v >= -1, "an integer of at least 1, or 0 or -1 to turn it off")
        _require_number("min_p", self.min_p, lambda v: 0 <= v <= 1, "a number from 0 to 1")

    def _check_lists(self) -> None:
        self._check_sizes()
        for name in ("stop", "bad_words"):
            for item in getattr(self, name):
                if not isinstance(item, str) or not item:
                    raise InvalidRequestError(f"{name} must hold non-empty strings, got {item!r}", param=name)
        if self.stop and not self.detokenize:
            raise InvalidRequestError("stop strings need detokenize=true", param="stop")
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
            for item in getattr(self, name) or ():
                _require_int(name, item, lambda v: v >= 0, "token ids of at least 0")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequestError("allowed_token_ids must not be empty", param="allowed_token_ids")
        if self.logprob_token_ids is not None and len(self.logprob_token_ids) > MAX_LOGPROB_TOKEN_IDS:
            raise InvalidRequestError(
                f"logprob_token_ids may hold at most {MAX_LOGPROB_TOKEN_IDS} ids, got {len(self.logprob_token_ids)}",
                param="logprob_token_ids",
            )
        if self.logit_bias is not None:
            self.logit_bias = {int(token): _clamped_bias(token, bias) for token, bias in self.logit_bias.items()}

    def _check_sizes(self) -> None:
        """What would take long to check item by item, or to tokenise, is refused by its size."""
        words, bias = self.bad_words or (), self.logit_bias or {}
        if len(words) > MAX_BAD_WORD_SEQUENCES:
            raise InvalidRequestError(f"bad_words may hold at most {MAX_BAD_WORD_SEQUENCES} words, got {len(words)}", param="bad_words")
        longest = max((len(word) for word in words if isinstance(word, str)), default=0)
        if longest > MAX_BAD_WORD_CHARS:
            raise InvalidRequestError(
                f"bad_words may hold words of at most {MAX_BAD_WORD_CHARS} characters, got one of {longest}", param="bad_words"
            )
        if len(bias) > MAX_LOGIT_BIAS_ENTRIES:
            raise InvalidRequestError(f"logit_bias may hold at most {MAX_LOGIT_BIAS_ENTRIES} entries, got {len(bias)}", param="logit_bias")


class BeamSearchParams(msgspec.Struct, kw_only=True):
    """Parameters of `LLM.beam_search`; `length_penalty` is the exponent of the length in a beam's score."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        _require_int("beam_width", self.beam_width, lambda v: 1 <= v <= 128, "an integer from 1 to 128")
        _require_int("max_tokens", self.max_tokens, lambda v: v >= 1, "an integer of at least 1")
        _require_number("temperature", self.temperature, lambda v: 0 <= v <= 2, "a number from 0 to 2")
        _require_number("length_penalty", self.length_penalty, lambda v: True, "a finite number")


def _clamped_bias(token: Any, bias: Any) -> float:
    _require_number("logit_bias", bias, lambda v: True, f"a finite number (here of token {token})")
    return max(-LOGIT_BIAS_LIMIT, min(LOGIT_BIAS_LIMIT, float(bias)))


def _require_int(name: str, value: Any, ok: Callable[[int], bool], wanted: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not ok(value):
        raise InvalidRequestError(f"{name} must be {wanted}, got {value!r}", param=name)


def _require_number(name: str, value: Any, ok: Callable[[float], bool], wanted: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or not ok(value):
        raise InvalidRequestError(f"{name} must be {wanted}, got {value!r}", param=name)
