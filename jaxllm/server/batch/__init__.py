"""Answering a file of requests in OpenAI's batch format."""

from __future__ import annotations

from jaxllm.server.batch.files import BatchFiles
from jaxllm.server.batch.run import Counts, answer_lines, run_batch

__all__ = ["BatchFiles", "Counts", "answer_lines", "run_batch"]
