"""Compiling grammars against a tokenizer: llguidance's matchers, which say token by token what may come next.

Matchers are made in threads with large stacks, since llguidance follows chains of rules recursively, and under limits of its own (steps
and states) that end any compilation within a moment.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING, Any

from jaxllm.errors import InvalidRequestError, QueueFullError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from jaxllm.text.tokenizer import Tokenizer

COMPILE_SECONDS = 10.0
_STACK_BYTES = 1 << 30  # address space; only what is used becomes memory
# Of a grammar as text, to which the time is about in proportion (up to 5 us a character): longer ones have a thread of their own, so that
# none but their like waits behind them.
_LONG = 16 * 1024
_CACHED_GRAMMARS = 64
_MAX_REASON_CHARS = 600
# Texts that grammars often let through whole, so that their tokens are not looked at one by one; short ones for the last of a maxLength.
_SLICES = [rf'[^"\\\x00-\x1F\x7F]{size}' for size in ("{1,2}", "{1,4}", "{1,7}", "{1,11}", "{1,16}", "{1,22}", "{1,30}", "+")]


class GrammarCompiler:
    """Makes matchers over the ids of one tokenizer, of a model whose logits have `vocab_size` columns.

    Ids without text are never allowed. Special tokens are allowed where a grammar names them (`<|name|>` in Lark) and never as text;
    end-of-sequence tokens where the grammar may end. Masks of its matchers have `vocab_size` + 1 bits, the last of which means nothing.
    Thread-safe.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._tokenizers: dict[tuple[int, ...], LLTokenizer] = {}
        self._cache: OrderedDict[tuple[str, tuple[int, ...]], LLMatcher] = OrderedDict()
        self._threads, self._threads_of_long = (ThreadPoolExecutor(1, thread_name_prefix=name) for name in ("grammar", "long-grammar"))

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokenizer.token_bytes(token_id)

    def submit(self, grammar: str, eos_token_ids: Sequence[int]) -> Future[LLMatcher]:
        """Compile in another thread. The result is a matcher of its own; the exception an InvalidRequestError."""
        threads = self._threads if len(grammar) <= _LONG else self._threads_of_long
        return self._submit(threads, self._matcher, grammar, tuple(eos_token_ids))

    def check(self, grammar: str, eos_token_ids: Sequence[int]) -> None:
        """Compile and wait.

        Raises:
            InvalidRequestError: the grammar is wrong, not supported, matches nothing, or goes beyond the limits.
            QueueFullError: too many others are being compiled.
        """
        self._submit(self._threads, self._ll_tokenizer, tuple(eos_token_ids)).result()
        future = self.submit(grammar, eos_token_ids)
        try:
            future.result(COMPILE_SECONDS)
        except FutureTimeout:
            if future.cancel():
                # It never began.
                raise QueueFullError(f"for {COMPILE_SECONDS:.0f} s other requests' grammars were compiled; try again later") from None
            raise _error(f"compiling it takes more than {COMPILE_SECONDS:.0f} s; make it simpler") from None

    def _submit(self, threads: ThreadPoolExecutor, function: Callable[..., Any], *args: Any) -> Future[Any]:
        with self._lock, _large_stacks():
            return threads.submit(_explained, function, *args)

    def _matcher(self, grammar: str, eos: tuple[int, ...]) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        key = grammar, eos
        with self._lock:
            known = self._cache.get(key)
            if known is not None:
                self._cache.move_to_end(key)
        if known is None:
            limits = LLParserLimits(verbose_errors=False)
            known = LLMatcher(self._ll_tokenizer(eos), grammar, log_level=0, limits=limits)
            if not known.is_error():
                # Tells a grammar that matches nothing.
                known.compute_bitmask()
            if known.is_error():
                raise _error(_reason(known.get_error()))
            with self._lock:
                self._cache[key] = known
                while len(self._cache) > _CACHED_GRAMMARS:
                    self._cache.popitem(last=False)
        return known.deep_copy()

    def _ll_tokenizer(self, eos: tuple[int, ...]) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        # Held while it is built (a second for a large vocabulary): others wait for the same one.
        with _BUILDING:
            known = self._tokenizers.get(eos)
            if known is None:
                vocabulary = _Vocabulary(self._tokenizer, self._vocab_size, eos)
                known = LLTokenizer(TokenizerWrapper(vocabulary), eos_token=vocabulary.eos_token_ids, slices=_SLICES)
                self._tokenizers[eos] = known
            return known


_BUILDING = threading.Lock()
_compilers: weakref.WeakKeyDictionary[Tokenizer, dict[int, GrammarCompiler]] = weakref.WeakKeyDictionary()


def grammar_compiler(tokenizer: Tokenizer, vocab_size: int) -> GrammarCompiler:
    """The compiler of a tokenizer: the same one for the front and the engine where they share a process."""
    with _BUILDING:
        known = _compilers.setdefault(tokenizer, {})
        if vocab_size not in known:
            known[vocab_size] = GrammarCompiler(tokenizer, vocab_size)
        return known[vocab_size]


class _Vocabulary:
    """What llguidance wants to know of a tokenizer. Ids without text have no bytes: they match nothing."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos: tuple[int, ...]):
        size = min(tokenizer.vocab_size, vocab_size)
        # One more than the logits have: see below.
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(size)] + [b""] * (vocab_size + 1 - size)
        self.eos_token_ids = [token_id for token_id in eos if token_id < size]
        self.special_token_ids = [token_id for token_id in {*tokenizer.all_special_ids, *self.eos_token_ids} if token_id < size]
        if not self.eos_token_ids:
            # llguidance must have one; this one lies behind the logits and is never sampled.
            self.tokens[vocab_size] = b"<end of output>"
            self.eos_token_ids = [vocab_size]
            self.special_token_ids.append(vocab_size)
        self.eos_token_id = self.eos_token_ids[0]
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(text, add_special_tokens=False)


@contextlib.contextmanager
def _large_stacks() -> Any:
    """Threads started inside get large stacks, where the platform lets them."""
    before = threading.stack_size()
    with contextlib.suppress(ValueError, RuntimeError):
        threading.stack_size(_STACK_BYTES)
    try:
        yield
    finally:
        threading.stack_size(before)


def _explained(function: Callable[..., Any], *args: Any) -> Any:
    """A panic of the library (no Exception) or a bug of ours is the end of one request only."""
    try:
        return function(*args)
    except InvalidRequestError:
        raise
    except BaseException as error:
        raise _error(f"{type(error).__name__}: {_reason(str(error))}") from error


def _reason(message: str) -> str:
    """llguidance's message for people: without the marks of its own machinery."""
    message = message.replace("<non-verbose/>", "").strip()
    if message.startswith("NoExtension"):
        return "it matches no text at all"
    return message if len(message) <= _MAX_REASON_CHARS else message[:_MAX_REASON_CHARS] + " ..."


def _error(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"structured_outputs cannot be used: {reason}", param="structured_outputs")
