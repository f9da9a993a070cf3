"""`python -m tests.server.fake_batch ARGUMENTS`: `jaxllm run-batch ARGUMENTS` around a fake engine that takes its time."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

import jaxllm.async_llm
from jaxllm.cli.main import main
from tests.server.fake_engine import FakeEngine, load_test_tokenizer


class AsyncLLM(FakeEngine):
    def __init__(self, *, config: Any, **more: Any):
        super().__init__(load_test_tokenizer(Path(tempfile.mkdtemp())))
        self.on_token = lambda request, position: asyncio.sleep(0.001)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *error: object) -> None: ...


if __name__ == "__main__":
    jaxllm.async_llm.AsyncLLM = AsyncLLM  # type: ignore[misc,assignment]
    sys.exit(main(["run-batch", *sys.argv[1:]]))
