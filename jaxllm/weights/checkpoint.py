"""What every checkpoint format offers the loader."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np


class Checkpoint(Protocol):
    """Named tensors, under the names of the Hugging Face format whatever the file is; shapes and dtypes come without reading data."""

    @property
    def location(self) -> str:
        """Where the tensors come from, for messages."""
        ...

    def names(self) -> Iterable[str]:
        """All tensor names."""
        ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> np.dtype:
        """The dtype that `read` returns."""
        ...

    def read(self, name: str) -> np.ndarray:
        """The whole tensor; a view of mapped memory where the format allows it."""
        ...
