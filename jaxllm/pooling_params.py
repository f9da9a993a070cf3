"""What a request to a pooling model may ask for, with vLLM's names and rules."""

from __future__ import annotations

from typing import Any, Literal, get_args

import msgspec

from jaxllm.errors import InvalidRequestError

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
    dimensions: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] = "right"
    returned_token_ids: list[int] | None = None
    step_tag_id: int | None = None

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
        if self.use_activation is not None and not isinstance(self.use_activation, bool):
            raise _wrong("use_activation", self.use_activation, "true or false")
        if self.dimensions is not None and not _at_least(self.dimensions, 1):
            raise _wrong("dimensions", self.dimensions, "an integer of at least 1")
        keep = self.truncate_prompt_tokens
        if keep is not None and keep != -1 and not _at_least(keep, 1):
            raise _wrong("truncate_prompt_tokens", keep, "at least 1, or -1 for what the model takes")
        if self.truncation_side not in ("left", "right"):
            raise _wrong("truncation_side", self.truncation_side, "left or right")
        ids = self.returned_token_ids
        if ids is not None and (not isinstance(ids, list) or not ids or not all(_at_least(item, 0) for item in ids)):
            raise _wrong("returned_token_ids", ids, "a list of integers of at least 0")
        if self.step_tag_id is not None and not _at_least(self.step_tag_id, 0):
            raise _wrong("step_tag_id", self.step_tag_id, "an integer of at least 0")


def _at_least(value: Any, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def _wrong(name: str, value: Any, wanted: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} must be {wanted}, got {value!r:.100}", param=name)
