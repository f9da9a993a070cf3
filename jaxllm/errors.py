"""Errors as types: raised where the fact is known, turned into HTTP in one place (`server/errors.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self


class JaxllmError(Exception):
    """Base of every error that jaxllm raises on purpose."""


class InvalidRequestError(JaxllmError, ValueError):
    """A request (or a parameter of one) that cannot be served: the caller's fault, HTTP 400.

    Args:
        message: what was given, why it cannot be, what would work.
        param: the request field at fault, or None where no single field is.
    """

    def __init__(self, message: str, *, param: str | None = None):
        super().__init__(message)
        self.param = param

    def renamed(self, field_names: Mapping[str, str]) -> Self:
        """The same error in terms of a request that names its fields otherwise."""
        name = field_names.get(self.param or "")
        return self if name is None else type(self)(str(self).replace(str(self.param), name, 1), param=name)


class NotSupportedError(InvalidRequestError):
    """An option that we know but do not offer (yet): refused, never ignored."""


class ConfigError(JaxllmError, ValueError):
    """An engine or server option that cannot be honoured."""


class ModelLoadError(JaxllmError):
    """A checkpoint that cannot be loaded: missing file, unknown tensor, wrong shape, unsupported architecture."""


class OutOfMemoryPlanError(JaxllmError):
    """The memory plan cannot fit; the message says which knob to turn and to what."""


class QueueFullError(JaxllmError):
    """Admission refused because the waiting queue is at its bound: HTTP 503 with Retry-After."""

    def __init__(self, message: str, *, retry_after_s: int = 1):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineDeadError(JaxllmError):
    """The engine process ended: every open and later request fails with its root cause."""


class RequestFailedError(JaxllmError):
    """One request failed inside the engine (its own fault is excluded by validation); the others go on."""


class DeadlineExceededError(JaxllmError):
    """The request was not finished by its deadline: HTTP 504."""
