"""Text to token ids without holding up the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import TYPE_CHECKING

from jaxllm.errors import InvalidRequestError

if TYPE_CHECKING:
    from jaxllm.text.tokenizer import Tokenizer

# Less text takes less time than a hop to another thread is worth.
_INLINE_CHARS = 8_192


class Tokenizing:
    """Encodes prompts: short ones at once, long ones in one thread of their own, hopeless ones not at all."""

    def __init__(self, tokenizer: Tokenizer, max_model_len: int):
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenize")

    async def encode(self, text: str, *, add_special_tokens: bool, truncated: bool = False) -> list[int]:
        """Token ids of one text, see `encode_all`."""
        return (await self.encode_all([text], add_special_tokens=add_special_tokens, truncated=truncated))[0]

    async def encode_all(self, texts: Sequence[str], *, add_special_tokens: bool, truncated: bool = False) -> list[list[int]]:
        """Token ids of each text; `truncated` says that what does not fit is going to be cut off.

        Raises:
            InvalidRequestError: a text is too long for the context whatever its tokens are.
        """
        encode = partial(self._tokenizer.encode, add_special_tokens=add_special_tokens)
        if sum(map(len, texts)) <= _INLINE_CHARS:
            return [*map(encode, texts)]
        in_thread = partial(asyncio.get_running_loop().run_in_executor, self._thread)
        if not truncated:
            self._check(max(map(len, texts)), await in_thread(lambda: self._longest_token))
        return await in_thread(lambda: [*map(encode, texts)])

    def _check(self, length: int, longest_token: int) -> None:
        if length > self._max_model_len * longest_token:
            raise InvalidRequestError(
                f"the prompt has {length} characters, which cannot fit the context of {self._max_model_len} tokens "
                f"(no token holds more than {longest_token} characters); shorten it, or set truncate_prompt_tokens",
                param="prompt",
            )

    @cached_property
    def _longest_token(self) -> int:
        """Characters of the longest token; a byte holds at most one character."""
        return max(len(self._tokenizer.token_bytes(token)) for token in range(self._tokenizer.vocab_size))
