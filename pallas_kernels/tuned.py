"""Block sizes that measuring found better than the defaults: a table that `scripts/tune_kernels.py` writes and kernels read."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parents[1] / "configs" / "tuned_blocks.json"


def exception(kernel: str, kind: str, key: str) -> dict[str, Any] | None:
    """Fields of the kernel's blocks for a device kind and the key of a shape, or None: the defaults do. No table, no exceptions."""
    return _read(TABLE).get(kernel, {}).get(kind, {}).get(key)


@functools.cache
def _read(table: Path) -> dict[str, dict[str, dict[str, dict[str, Any]]]]:
    return json.loads(table.read_text()) if table.is_file() else {}
