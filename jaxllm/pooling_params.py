"""What a request to a pooling model may ask for, with vLLM's names and rules."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from jaxllm.errors import InvalidRequestError
from jaxllm.sampling_params import TokenId, check_fields

PoolingTask = Literal["embed", "classify", "token_embed", "token_classify"]
TASKS: tuple[str, ...] = get_args(PoolingTask)
# Names that tasks had in earlier releases of vLLM, and what is meant.
_OLD_TASKS = {"score": "classify", "reward": "token_classify", "encode": "token_embed or token_classify"}


class PoolingParams(msgspec.Struct, kw_only=True, omit_defaults=True, frozen=True):
    """Parameters of one pooling request. `token_*` tasks answer for each token, the others for the whole prompt.

    Attributes:
        task: embed, classify, token_embed or token_classify; None is what the model is for.
        use_activation: False leaves embeddings unnormalised and scores of classes as logits. Default: as the model's files say.
        dimensions: keep this many leading dimensions of an embedding, normalised again (Matryoshka models).
        truncate_prompt_tokens: cut the prompt to this many tokens; -1: to what the model takes.
        truncation_side: where that cuts; special tokens of texts stay.
        returned_token_ids: columns of a per-token answer to return.
        step_tag_id: positions of a per-token answer to return: those of this token.
    """

    task: str | None = None
    use_activation: bool | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    truncation_side: Literal["left", "right"] = "right"
    returned_token_ids: Annotated[list[TokenId], Meta(min_length=1)] | None = None
    step_tag_id: TokenId | None = None

    def __post_init__(self) -> None:
        self.verify()

    def clone(self, **changes: Any) -> PoolingParams:
        """A validated copy with `changes` applied."""
        return msgspec.structs.replace(self, **changes)

    def verify(self) -> None:
        """Check every field by itself.

        Raises:
            InvalidRequestError: one that is out of its range.
        """
        if self.task is not None and self.task not in TASKS:
            hint = f"; use {_OLD_TASKS[self.task]}" if self.task in _OLD_TASKS else ""
            raise InvalidRequestError(f"task must be one of {', '.join(TASKS)}; got {self.task!r:.100}{hint}", param="task")
        check_fields(self)
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequestError("truncate_prompt_tokens must be at least 1, or -1, got 0", param="truncate_prompt_tokens")
