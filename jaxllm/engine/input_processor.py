"""From what a user gives to what the engine takes: a prompt in any form and sampling parameters become checked `EngineRequest`s.

Everything that can be refused without the device is refused here, so that the engine never meets a request that it cannot serve.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from jaxllm.core_types import EngineInfo, EngineRequest
from jaxllm.engine.generation_config import GenerationDefaults
from jaxllm.errors import InvalidRequestError, NotSupportedError
from jaxllm.pooling_params import PoolingParams
from jaxllm.sampling_params import MAX_BAD_WORD_SEQUENCES, MAX_LOGIT_BIAS_ENTRIES, ReasoningMarks, SamplingParams
from jaxllm.text.grammar import output_grammar
from jaxllm.text.grammar_compiler import grammar_compiler

if TYPE_CHECKING:
    from jaxllm.text.tokenizer import Tokenizer

# A prompt: text, token ids, {"prompt": text} or {"prompt_token_ids": ids}; the dicts may hold "cache_salt". Where there is an encoder, it
# reads that, and {"encoder_prompt": prompt, "decoder_prompt": prompt} says where its decoder begins.
Prompt = str | Sequence[int] | Mapping[str, Any]

# The most tokens (prompt and outputs, over all n sequences) that one request may come to hold. Bounds the memory of one request.
MAX_REQUEST_TOKENS = 2**22

_CACHE_SALT_LIMIT = 128
_CACHE_SALT_FORBIDDEN = "@/\\\0"
_NOT_OFFERED = ("prompt_embeds", "multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs")
_HALVES = ("encoder_prompt", "decoder_prompt")


@dataclass(slots=True)
class ProcessedRequest:
    """A checked request. `children` are its n sequences in order of index; with n = 1 the only child bears the request's own id. With an
    encoder, `prompt` is what the decoder begins with.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    arrival_time: float
    children: list[EngineRequest] = field(default_factory=list)
    # Set where the answer is a vector.
    pooling_params: PoolingParams | None = None
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None


class InputProcessor:
    """Checks requests against a started engine and its tokenizer.

    `max_logprobs` is the largest `logprobs` that a request may ask for (-1: as many as the vocabulary holds); `priorities` says
    whether the engine schedules by priority.
    """

    def __init__(
        self, info: EngineInfo, tokenizer: Tokenizer, defaults: GenerationDefaults, *, max_logprobs: int = 20, priorities: bool = False
    ):
        self._info = info
        self._tokenizer = tokenizer
        self._defaults = defaults
        self._priorities = priorities
        self._grammars = grammar_compiler(tokenizer, info.vocab_size)
        self._max_logprobs = info.vocab_size if max_logprobs == -1 else min(max_logprobs, info.vocab_size)
        # Rows of the head beyond the tokenizer are padding: accepted in prompts, never sampled.
        self._num_sampled_ids = min(info.vocab_size, tokenizer.vocab_size)

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        arrival_time: float | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        deadline: float | None = None,
        add_special_tokens: bool = True,
    ) -> ProcessedRequest:
        """Check one request and fan it out into its n sequences.

        `deadline` is in seconds since the epoch; `add_special_tokens` says whether text gets the tokenizer's (a rendered chat
        template brings its own).

        Raises:
            InvalidRequestError: anything about the request that cannot be served; the message says what would work.
        """
        if self._info.pooling is not None:
            raise InvalidRequestError(
                "this model answers with vectors and generates nothing: embed, classify, score and encode work (/v1/embeddings, /classify, "
                "/score, /pooling); runner='generate' makes a model that can generate do so"
            )
        prompt, decoder_prompt = self._halves(prompt)
        text, token_ids, salt = self._read_prompt(prompt, add_special_tokens)
        if salt is not None and cache_salt is not None and salt != cache_salt:
            raise InvalidRequestError(
                f"cache_salt is given twice: {salt!r} with the prompt and {cache_salt!r} beside it", param="cache_salt"
            )
        cache_salt = _checked_salt(salt if salt is not None else cache_salt)
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(f"sampling_params must be SamplingParams, got {type(params).__name__}", param="sampling_params")
        check_envelope(request_id, priority, deadline, priorities=self._priorities)
        params.verify()
        token_ids = self._truncated(token_ids, params)
        info, encoder_text, encoder_ids = self._info, None, None
        if info.encoder is None:
            room = f"the context holds {info.max_model_len} tokens, prompt and output together; send at most {info.max_prompt_len}"
        else:
            room = f"the encoder takes {info.max_prompt_len} in one step; raise max_num_batched_tokens, where the model can take more"
        check_prompt(token_ids, info.max_prompt_len, room, info.vocab_size)
        if info.encoder is not None:
            encoder_text, encoder_ids = text, token_ids
            text, token_ids = self._decoder_prompt(decoder_prompt, info.encoder.decoder_start, params)
        params = self._complete(params, len(token_ids))
        arrival = time.time() if arrival_time is None else arrival_time
        request = ProcessedRequest(
            request_id, text, token_ids, params, arrival, encoder_prompt=encoder_text, encoder_prompt_token_ids=encoder_ids
        )
        for index, child in enumerate(_children(params)):
            request.children.append(
                EngineRequest(
                    request_id=request_id if params.n == 1 else f"{index}_{request_id}",
                    prompt_token_ids=token_ids,
                    sampling_params=child,
                    arrival_time=arrival,
                    priority=priority,
                    cache_salt=cache_salt,
                    deadline=deadline,
                    encoder_token_ids=encoder_ids or [],
                )
            )
        return request

    # ----------------------------------------------------------------------------------------------------- prompts

    def _halves(self, prompt: Prompt) -> tuple[Prompt, Prompt | None]:
        """The prompt itself, which an encoder reads where there is one, and what its decoder is to go on from."""
        if not isinstance(prompt, Mapping) or all(prompt.get(half) is None for half in _HALVES):
            return prompt, None
        if self._info.encoder is None:
            raise InvalidRequestError("this model has no encoder: send prompt instead of encoder_prompt and decoder_prompt", param="prompt")
        if set(prompt) - set(_HALVES) or prompt.get("encoder_prompt") is None:
            raise InvalidRequestError(
                "a prompt in halves holds encoder_prompt and, if need be, decoder_prompt, and nothing else", param="prompt"
            )
        return prompt["encoder_prompt"], prompt.get("decoder_prompt")

    def _decoder_prompt(self, prompt: Prompt | None, start: list[int], params: SamplingParams) -> tuple[str | None, list[int]]:
        """The text and the ids that the decoder goes on from: the model's own start, or its first token before what was given."""
        if params.prompt_logprobs is not None:
            raise NotSupportedError("the input of an encoder has no log-probabilities; leave prompt_logprobs out", param="prompt_logprobs")
        if prompt is None:
            return None, start
        text, ids, salt = self._read_prompt(prompt, add_special_tokens=False)
        if salt is not None:
            raise InvalidRequestError("cache_salt belongs to encoder_prompt", param="cache_salt")
        ids = ids if ids[:1] == start[:1] else [start[0], *ids]
        longest = self._info.max_model_len - 1
        check_prompt(ids, longest, f"the decoder must have room for an output; send at most {longest}", self._info.vocab_size)
        return text, ids

    def _read_prompt(self, prompt: Prompt, add_special_tokens: bool) -> tuple[str | None, list[int], str | None]:
        """The prompt's text (None where ids were given), its token ids, and the cache salt that came with it."""
        text, ids, salt = read_prompt(prompt)
        return text, self._encode(text or "", add_special_tokens) if ids is None else ids, salt

    def _encode(self, text: str, add_special_tokens: bool, param: str = "prompt") -> list[int]:
        check_unicode(param, text)
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _truncated(self, token_ids: list[int], params: SamplingParams) -> list[int]:
        keep, limit = params.truncate_prompt_tokens, self._info.max_prompt_len + 1
        if keep is None:
            return token_ids
        if keep == -1:
            # The most that leaves room for the tokens asked for.
            keep = self._info.max_kept(params.max_tokens)
        elif keep > limit:
            raise InvalidRequestError(
                f"truncate_prompt_tokens={keep} exceeds the context of {limit} tokens; use at most {limit - 1}, or -1",
                param="truncate_prompt_tokens",
            )
        return token_ids[-keep:]

    # --------------------------------------------------------------------------------------------------- parameters

    def _complete(self, params: SamplingParams, prompt_len: int) -> SamplingParams:
        """The engine's own copy of `params`: limits applied, ids checked, bad words tokenised, end-of-sequence ids filled in."""
        room = self._info.max_model_len - prompt_len
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        if params.min_tokens > max_tokens:
            raise InvalidRequestError(
                f"min_tokens={params.min_tokens} cannot be reached: the context of {self._info.max_model_len} tokens leaves {room} "
                f"after the prompt's {prompt_len}",
                param="min_tokens",
            )
        self._check_logprobs(params)
        self._check_ids(params)
        for stop in params.stop or ():
            check_unicode("stop", stop)
        bad_words = self._tokenise_bad_words(params.bad_words)
        self._check_bans(params, bad_words)
        grammar = None
        if params.structured_outputs is not None:
            grammar = output_grammar(params.structured_outputs, self._special_id)
            self._grammars.check(grammar, self._defaults.eos_token_ids)
        # Every sequence takes all of these to the engine; eight characters or ids count as much as a token, which takes memory there.
        extra = sum(map(len, (*(params.stop or ()), grammar or "", params.allowed_token_ids or ()))) // 8
        if params.n * (prompt_len + max_tokens + extra) > MAX_REQUEST_TOKENS:
            raise InvalidRequestError(
                f"n={params.n} sequences of {prompt_len} prompt and up to {max_tokens} output tokens, with stop strings, allowed ids and a "
                f"grammar like {extra} more, exceed the {MAX_REQUEST_TOKENS} tokens that one request may hold; lower n or max_tokens",
                param="n",
            )
        return params.clone(
            max_tokens=max_tokens,
            reasoning_marks=self._marks(params),
            # More than all is all.
            top_k=min(params.top_k, self._info.vocab_size),
            thinking_token_budget=None if params.thinking_token_budget is None else min(params.thinking_token_budget, max_tokens),
            bad_words_token_ids=bad_words or None,
            eos_token_ids=self._defaults.eos_token_ids,
            # The engine needs what it comes to, not how it was asked for.
            structured_outputs=None,
            output_grammar=grammar,
        )

    def _marks(self, params: SamplingParams) -> ReasoningMarks | None:
        """What a budget of reasoning needs to know; None without one."""
        if params.thinking_token_budget is None:
            return None
        marks = params.reasoning_marks
        if marks is None:
            raise InvalidRequestError(
                "thinking_token_budget needs a model whose reasoning is read; start the server with --reasoning-parser",
                param="thinking_token_budget",
            )
        return msgspec.structs.replace(marks, closing_ids=self._encode(marks.closing, False))

    def _special_id(self, text: str) -> int | None:
        token_id = self._tokenizer.token_to_id(text)
        return token_id if token_id in self._tokenizer.all_special_ids else None

    def _check_logprobs(self, params: SamplingParams) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name)
            wanted = self._info.vocab_size if value == -1 else value
            if wanted is not None and wanted > self._max_logprobs:
                raise InvalidRequestError(
                    f"{name} asks for {'all' if value == -1 else value} tokens a position, but at most {self._max_logprobs} are given; "
                    f"start the engine with a larger max_logprobs, or ask for fewer",
                    param=name,
                )
        ids = params.logprob_token_ids
        if ids is not None and params.logprobs is not None and params.logprobs != len(ids):
            raise InvalidRequestError(
                f"logprobs={params.logprobs} differs from the {len(ids)} ids of logprob_token_ids; leave logprobs out", param="logprobs"
            )

    def _check_ids(self, params: SamplingParams) -> None:
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids", "logit_bias"):
            ids = getattr(params, name)
            if ids:
                check_in_vocabulary(name, ids, self._info.vocab_size)

    def _tokenise_bad_words(self, words: Sequence[str] | None) -> list[list[int]]:
        """Each word with and without a leading space, since it may come at the start of a line or within one."""
        sequences: dict[tuple[int, ...], None] = {}
        for word in words or ():
            bare = word.lstrip() or word
            for text in (bare, " " + bare):
                ids = self._encode(text, False, "bad_words")
                if ids:
                    sequences[tuple(ids)] = None
        if len(sequences) > MAX_BAD_WORD_SEQUENCES:
            raise InvalidRequestError(
                f"bad_words come to {len(sequences)} token sequences (each word with and without a leading space); "
                f"at most {MAX_BAD_WORD_SEQUENCES} are allowed",
                param="bad_words",
            )
        return [list(ids) for ids in sequences]

    def _check_bans(self, params: SamplingParams, bad_words: list[list[int]]) -> None:
        """At least one token must be left to sample, and the bans must fit the sampler's table."""
        banned = {ids[0] for ids in bad_words if len(ids) == 1}
        if params.min_tokens:
            banned.update(self._defaults.eos_token_ids, params.stop_token_ids or ())
        # A word of several tokens takes a row of the table while its last token is banned.
        ends = {ids[-1] for ids in bad_words if len(ids) > 1}
        entries = len(banned | ends) + len(params.logit_bias or ())
        if entries > MAX_LOGIT_BIAS_ENTRIES:
            raise InvalidRequestError(
                f"logit_bias, bad_words and (with min_tokens) stop ids hold {entries} entries together; "
                f"at most {MAX_LOGIT_BIAS_ENTRIES} fit",
                param="logit_bias",
            )
        allowed = range(self._num_sampled_ids) if params.allowed_token_ids is None else params.allowed_token_ids
        if all(token in banned or token >= self._num_sampled_ids for token in allowed):
            causes = "bad_words, min_tokens or their lack of a text" if params.min_tokens else "bad_words or their lack of a text"
            raise InvalidRequestError(
                f"allowed_token_ids leaves no token to sample: all of its ids are excluded by {causes}", param="allowed_token_ids"
            )


def _children(params: SamplingParams) -> list[SamplingParams]:
    """The parameters of each of the n sequences: seed, seed + 1, ...; only the first computes the prompt's log-probabilities."""
    if params.n == 1:
        return [params]
    first, other = params.clone(n=1), params.clone(n=1, prompt_logprobs=None)
    if params.seed is None:
        return [first, *[other] * (params.n - 1)]
    # Seeds are 64-bit integers and wrap around.
    return [first, *(other.clone(seed=(params.seed + index + 2**63) % 2**64 - 2**63) for index in range(1, params.n))]


def check_envelope(request_id: str, priority: Any, deadline: Any, *, priorities: bool) -> None:
    """Check what comes with a prompt, whatever is to be done with it. `priorities`: the engine schedules by priority."""
    if isinstance(priority, bool) or not isinstance(priority, int) or not -(2**63) <= priority < 2**63:
        raise InvalidRequestError(f"priority must be a 64-bit integer, got {priority!r}", param="priority")
    if priority and not priorities:
        raise InvalidRequestError(
            f"priority={priority} needs an engine started with scheduling_policy='priority'; send 0 or leave it out", param="priority"
        )
    if deadline is not None and (isinstance(deadline, bool) or not isinstance(deadline, int | float)):
        raise InvalidRequestError(f"deadline must be a time in seconds since the epoch, got {deadline!r}", param="deadline")
    check_unicode("request_id", request_id)


def check_prompt(token_ids: list[int], longest: int, room: str, vocab_size: int) -> None:
    """Whether a prompt has from one to `longest` tokens (`room` says how many those are), all of the vocabulary."""
    if not token_ids:
        raise InvalidRequestError("the prompt is empty; send at least one token", param="prompt")
    if len(token_ids) > longest:
        raise InvalidRequestError(f"the prompt has {len(token_ids)} tokens, but {room}, or set truncate_prompt_tokens", param="prompt")
    check_in_vocabulary("prompt", token_ids, vocab_size)


def check_in_vocabulary(param: str, ids: Collection[int], vocab_size: int) -> None:
    for token_id in (max(ids), min(ids)):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"{param} holds token id {token_id}, outside the vocabulary of {vocab_size} ids (0 to {vocab_size - 1})", param=param
            )


def read_prompt(prompt: Prompt) -> tuple[str | None, list[int] | None, str | None]:
    """Text and token ids of a prompt, one of them None where only the other was given, and the cache salt that came with it."""
    if isinstance(prompt, str):
        return prompt, None, None
    if not isinstance(prompt, Mapping):
        return None, _checked_ids(prompt), None
    for key in prompt:
        if key in _NOT_OFFERED and prompt[key] is not None:
            raise NotSupportedError(f"prompts with {key!r} are not supported yet; send text or token ids", param=key)
    unknown = set(prompt) - {"prompt", "prompt_token_ids", "cache_salt", *_NOT_OFFERED}
    if unknown:
        raise InvalidRequestError(
            f"unknown key {sorted(map(str, unknown))[0]!r} in the prompt; it may hold prompt, prompt_token_ids and cache_salt",
            param="prompt",
        )
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is not None and not isinstance(text, str):
        raise InvalidRequestError(f"prompt must be a string, got {type(text).__name__}", param="prompt")
    if text is None and ids is None:
        raise InvalidRequestError("the prompt must hold either prompt or prompt_token_ids", param="prompt")
    return text, None if ids is None else _checked_ids(ids), prompt.get("cache_salt")


def _checked_ids(ids: Any) -> list[int]:
    """A prompt's token ids, which must be integers of at least 0."""
    if isinstance(ids, bytes | str) or not isinstance(ids, Sequence):
        raise InvalidRequestError(
            f"a prompt is text, a list of token ids, or a dict with prompt or prompt_token_ids; got {type(ids).__name__}", param="prompt"
        )
    ids = list(ids)
    for kind in set(map(type, ids)) - {int}:
        raise InvalidRequestError(f"token ids of a prompt must be integers, got {kind.__name__}", param="prompt")
    if ids and min(ids) < 0:
        raise InvalidRequestError(f"token ids of a prompt must be 0 or more, got {min(ids)}", param="prompt")
    return ids


def check_unicode(param: str, text: str) -> None:
    """Refuse lone surrogates (JSON's \\ud800 gives one): they are no text, and neither tokenizers nor messages take them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequestError(f"{param} holds a lone surrogate, which is not text; send valid Unicode", param=param) from None


def _checked_salt(salt: Any) -> str | None:
    if salt is None:
        return None
    if not isinstance(salt, str) or not 1 <= len(salt) <= _CACHE_SALT_LIMIT or any(char in salt for char in _CACHE_SALT_FORBIDDEN):
        raise InvalidRequestError(
            f"cache_salt must be a string of 1 to {_CACHE_SALT_LIMIT} characters without @, /, \\ and NUL, got {salt!r:.200}",
            param="cache_salt",
        )
    check_unicode("cache_salt", salt)
    return salt
