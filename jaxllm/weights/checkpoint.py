"""What every checkpoint format offers the loader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np


class Tensor(NamedTuple):
    """A tensor of a checkpoint: `read` gives all of it with this shape and dtype; a view of mapped memory where the format allows it."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], Any]


@dataclass
class Checkpoint:
    """Named tensors, under the names of the Hugging Face format whatever the file is. `location` says in messages where they come from."""

    location: str
    tensors: Mapping[str, Tensor]

    def names(self) -> Iterable[str]:
        return self.tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def dtype(self, name: str) -> np.dtype:
        return self.tensors[name].dtype

    def read(self, name: str) -> Any:
        return self.tensors[name].read()
