"""Log-probabilities in the two formats of OpenAI's API, and the text and bytes of single tokens."""

from __future__ import annotations

import codecs
import functools
import math
from collections.abc import Callable, Container, Iterable, Sequence
from typing import TYPE_CHECKING

from jaxllm.outputs import Logprob
from jaxllm.outputs import PromptLogprobs as EnginePromptLogprobs
from jaxllm.server.responses import ChatLogprob, ChatLogprobs, CompletionLogprobs, PromptLogprob, PromptLogprobs, TopLogprob

if TYPE_CHECKING:
    from jaxllm.text.tokenizer import Tokenizer

# JSON has no -inf.
LOWEST_LOGPROB = -9999.0


# The text and the bytes of a token.
TokenTexts = Callable[[int], tuple[str, bytes]]


def token_texts(tokenizer: Tokenizer) -> TokenTexts:
    """Text and bytes of tokens. A token that is only a part of a character is shown as OpenAI shows it: `bytes:\\xe2\\x80`."""

    @functools.cache
    def of(token_id: int) -> tuple[str, bytes]:
        raw = tokenizer.token_bytes(token_id)
        try:
            return raw.decode(), raw
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw

    return of


class LogprobFormat:
    """How one request wants its tokens shown.

    Args:
        top: how many alternatives a position may list; -1 lists all that the engine gave.
        as_token_ids: show tokens as `token_id:N`.
    """

    def __init__(self, texts: TokenTexts, *, top: int, as_token_ids: bool):
        self.texts = texts
        self.top = top
        self.as_token_ids = as_token_ids

    def name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self.as_token_ids else self.texts(token_id)[0]

    def chat(self, token_ids: Sequence[int], logprobs: Sequence[dict[int, Logprob]]) -> ChatLogprobs:
        """Chat's format; the alternatives are exactly the `top` best ones."""
        content = []
        for token_id, position in zip(token_ids, logprobs, strict=True):
            best = [
                TopLogprob(self.name(token), clamped(entry.logprob), list(self.texts(token)[1])) for token, entry in self._best(position)
            ]
            own = clamped(position[token_id].logprob)
            content.append(ChatLogprob(self.name(token_id), own, list(self.texts(token_id)[1]), best))
        return ChatLogprobs(content)

    def _best(self, position: dict[int, Logprob]) -> list[tuple[int, Logprob]]:
        ranked = sorted(position.items(), key=lambda item: -item[1].logprob)
        return ranked if self.top == -1 else ranked[: self.top]


class CompletionLogprobsBuilder:
    """Completions' format for one choice, built piece by piece: text offsets go on from piece to piece.

    Offsets count characters of the tokens' own text, so that a token within a character starts where the character does.
    """

    def __init__(self, form: LogprobFormat):
        self._form = form
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(
        self,
        token_ids: Iterable[int],
        logprobs: Iterable[dict[int, Logprob] | None],
        hidden: Container[int] = (),
        piece: CompletionLogprobs | None = None,
    ) -> CompletionLogprobs:
        """The logprobs of the next tokens, behind those of `piece`; the alternatives are the `top` best ones and the token itself.

        `hidden` tokens are not part of the text that the offsets point into.
        """
        piece = CompletionLogprobs([], [], [], []) if piece is None else piece
        for token_id, position in zip(token_ids, logprobs, strict=True):
            piece.tokens.append(self._form.name(token_id))
            piece.text_offset.append(self._offset)
            if token_id not in hidden:
                self._offset += len(self._decoder.decode(self._form.texts(token_id)[1]))
            if position is None:
                piece.token_logprobs.append(None)
                piece.top_logprobs.append(None)
                continue
            piece.token_logprobs.append(clamped(position[token_id].logprob))
            # Two tokens may have one text: the better one keeps it.
            best: dict[str, float] = {}
            for token, entry in [*self._form._best(position), (token_id, position[token_id])]:
                best.setdefault(self._form.name(token), clamped(entry.logprob))
            piece.top_logprobs.append(best)
        return piece


def prompt_logprobs(found: EnginePromptLogprobs | None, form: LogprobFormat) -> PromptLogprobs | None:
    """The `prompt_logprobs` of a response."""
    if found is None:
        return None
    return [
        None
        if position is None
        else {token: PromptLogprob(clamped(entry.logprob), entry.rank, form.name(token)) for token, entry in position.items()}
        for position in found
    ]


def clamped(logprob: float) -> float:
    return logprob if logprob > LOWEST_LOGPROB or math.isnan(logprob) else LOWEST_LOGPROB
