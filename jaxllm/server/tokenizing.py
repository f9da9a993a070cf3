"""Text to token ids without holding up the event loop."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING

from jaxllm.errors import InvalidRequestError

if TYPE_CHECKING:
    from jaxllm.text.tokenizer import Tokenizer

# Shorter texts take less time than a hop to another thread is worth.
_INLINE_CHARS = 8_192


class Tokenizing:
    """Encodes prompts: short ones at once, long ones in one thread of their own, hopeless ones not at all."""

    def __init__(self, tokenizer: Tokenizer, max_model_len: int):
        self.tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenize")

    async def encode(self, text: str, *, add_special_tokens: bool, truncated: bool = False) -> list[int]:
        """Token ids of `text`; `truncated` says that what does not fit is going to be cut off.

        Raises:
            InvalidRequestError: the text is too long for the context whatever its tokens are.
        """
        if len(text) <= _INLINE_CHARS:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        loop = asyncio.get_running_loop()
        longest = await loop.run_in_executor(self._thread, lambda: self._longest_token)
        if len(text) > self._max_model_len * longest and not truncated:
            raise InvalidRequestError(
                f"the prompt has {len(text)} characters, which cannot fit the context of {self._max_model_len} tokens "
                f"(no token holds more than {longest} characters); shorten it, or set truncate_prompt_tokens",
                param="prompt",
                value=len(text),
            )
        return await loop.run_in_executor(self._thread, lambda: self.tokenizer.encode(text, add_special_tokens=add_special_tokens))

    @cached_property
    def _longest_token(self) -> int:
        """Characters of the longest token; a byte holds at most one character."""
        return max(len(self.tokenizer.token_bytes(token)) for token in range(self.tokenizer.vocab_size))
