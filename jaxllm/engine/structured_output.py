"""Grammars of requests inside the engine: compiled off the step, followed token by token, turned into bitmasks of allowed ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING

import numpy as np

from jaxllm.core_types import ErrorKind
from jaxllm.engine.thinking import ThinkingBudget
from jaxllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

    from jaxllm.text.grammar_compiler import GrammarCompiler


class OutputGrammar:
    """The grammar of one request and how far its output has come. Kept on the request, so that it outlives preemption."""

    def __init__(self, compiling: Future[LLMatcher], params: SamplingParams):
        self.compiling = compiling
        self._matcher: LLMatcher | None = None
        self._allowed_ids = params.allowed_token_ids
        self._allowed_words: np.ndarray | None = None
        self._eos_ids = params.eos_token_ids if params.ignore_eos else []
        self._end_ids = [*params.eos_token_ids, *(params.stop_token_ids or ())]
        self._min_tokens = params.min_tokens
        self.num_tokens = 0

    @property
    def is_ready(self) -> bool:
        """Whether it is compiled, or cannot be."""
        return self.compiling.done()

    @property
    def failure(self) -> str | None:
        """Why it could not be compiled, or None."""
        error = self.compiling.exception()
        return None if error is None else str(error)

    @property
    def matcher(self) -> LLMatcher:
        """Raises what compiling raised."""
        if self._matcher is None:
            self._matcher = self.compiling.result()
        return self._matcher

    def accept(self, token_id: int) -> tuple[ErrorKind, str] | None:
        """Follow a sampled token. Returns None, or why it cannot be followed: the mask was wrong (FAILED) or, where the grammar has a
        place for the token, a limit of the matcher was passed (INVALID). The matcher's errors do not tell one from the other.
        """
        self.num_tokens += 1
        fits = self.matcher.validate_tokens([token_id])
        if self.matcher.consume_token(token_id):
            return None
        return (ErrorKind.INVALID if fits else ErrorKind.FAILED), self._error

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow but the end."""
        return self.matcher.is_stopped() and not self.matcher.is_error()

    @property
    def may_end(self) -> bool:
        return self.matcher.is_accepting()

    @property
    def _error(self) -> str:
        return self.matcher.get_error().replace("<non-verbose/>", "").strip()

    @property
    def dead_end(self) -> str:
        """Why nothing may come next, for people."""
        if self._error:
            return f"the output grammar cannot be followed any further: {self._error}"
        return "no token is left to sample: those that the output grammar allows here are excluded by allowed_token_ids, or have no token"

    def restrict(self, words: np.ndarray) -> None:
        """Take out of a mask (uint32 words) what the request's other parameters forbid.

        The end is put off until `min_tokens` only as long as the grammar lets something else come: the grammar wins.
        """
        if self._allowed_ids is not None:
            if self._allowed_words is None:
                self._allowed_words = mask_of(self._allowed_ids, len(words))
            words &= self._allowed_words
        _take_out(words, self._eos_ids)
        if self.num_tokens < self._min_tokens:
            _take_out(words, self._end_ids, unless_empty=True)


class GrammarMasks:
    """Compiles the grammars of requests and computes their masks, on all cores; and what else asks for masks.

    Args:
        compiler: of the model's tokenizer.
        vocab_size: columns of the logits.
    """

    def __init__(self, compiler: GrammarCompiler, vocab_size: int):
        self._compiler = compiler
        self._vocab_size = vocab_size
        self._executor: LLExecutor | None = None

    def start(self, params: SamplingParams) -> OutputGrammar:
        """Begin to compile the grammar of a request."""
        assert params.output_grammar is not None
        return OutputGrammar(self._compiler.submit(params.output_grammar, params.eos_token_ids), params)

    def budget(self, params: SamplingParams) -> ThinkingBudget:
        """Follow the reasoning of a request that may only take so long."""
        return ThinkingBudget(params, self._compiler.token_bytes)

    def mask(self, params: SamplingParams, only: int | None) -> np.ndarray:
        """[ceil(V / 32)] uint32 of a request without a grammar: the one token that may come, or those that the request allows."""
        allowed = [only] if only is not None else params.allowed_token_ids
        words = -(-self._vocab_size // 32)
        return np.full(words, 0xFFFFFFFF, np.uint32) if allowed is None else mask_of(allowed, words)

    def masks(self, grammars: Sequence[OutputGrammar]) -> list[np.ndarray]:
        """[ceil(V / 32)] uint32 for each: the ids that may come next, bit by bit, lowest first."""
        from llguidance import LLExecutor
        from llguidance.numpy import fill_next_token_bitmask_par

        if self._executor is None:
            self._executor = LLExecutor()
        masks = np.zeros((len(grammars), self._vocab_size // 32 + 1), np.int32)
        fill_next_token_bitmask_par(self._executor, [(grammar.matcher, i) for i, grammar in enumerate(grammars)], masks)
        words = masks.view(np.uint32)[:, : -(-self._vocab_size // 32)]
        for grammar, row in zip(grammars, words, strict=True):
            grammar.restrict(row)
        return list(words)

    @staticmethod
    def wait(grammars: Iterable[OutputGrammar], seconds: float) -> None:
        """Return when one more is compiled, or after `seconds`."""
        wait([grammar.compiling for grammar in grammars], seconds, FIRST_COMPLETED)


def mask_of(token_ids: Sequence[int], num_words: int) -> np.ndarray:
    """[num_words] uint32 with the bits of `token_ids` set."""
    bits = np.zeros(num_words * 32, np.bool_)
    bits[np.asarray(token_ids, np.int64)] = True
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)


def _take_out(words: np.ndarray, token_ids: Sequence[int], *, unless_empty: bool = False) -> None:
    if not token_ids:
        return
    before = words.copy() if unless_empty else None
    for token_id in token_ids:
        if token_id // 32 < len(words):
            words[token_id // 32] &= np.uint32(~(1 << token_id % 32) & 0xFFFFFFFF)
    if before is not None and not words.any():
        words[:] = before
