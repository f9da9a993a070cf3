"""Errors as HTTP: the one place where an exception becomes a status and an OpenAI error body."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Literal

import msgspec
from fastapi import FastAPI
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from jaxllm.errors import DeadlineExceededError, EngineDeadError, InvalidRequestError, JaxllmError, QueueFullError, RequestFailedError

logger = logging.getLogger(__name__)

MAX_LISTED_ERRORS = 10
MAX_ERROR_CHARS = 1_000
# Of a whole message: values that it shows may be as large as the request.
MAX_MESSAGE_CHARS = (MAX_LISTED_ERRORS + 1) * MAX_ERROR_CHARS

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestTooLargeError",
    422: "UnprocessableEntityError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
}


_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}


class ErrorInfo(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(msgspec.Struct):
    """OpenAI's error body: {"error": {message, type, param, code}}."""

    error: ErrorInfo


class AnthropicErrorInfo(msgspec.Struct):
    type: str
    message: str


class AnthropicErrorBody(msgspec.Struct, kw_only=True):
    """Anthropic's error body."""

    type: Literal["error"] = "error"
    error: AnthropicErrorInfo
    request_id: str | None = None


class UnauthorizedError(JaxllmError):
    """No API key, or a wrong one."""


class NotFoundError(InvalidRequestError):
    """The request names something that is not here."""


class ModelNotFoundError(NotFoundError):
    """The request names a model that is not served."""


class RequestTooLargeError(JaxllmError):
    """The body is larger than the server takes."""


class NotReadyError(JaxllmError):
    """The model is still loading, or the server is shutting down: try again, here or elsewhere."""

    def __init__(self, message: str, *, retry_after_s: int):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ClientDisconnected(Exception):
    """The client is gone: nobody reads an answer. Not an error of anybody's."""


def status_of(error: BaseException) -> int:
    """The HTTP status that an exception stands for."""
    match error:
        case NotFoundError():
            return 404
        case InvalidRequestError() | ValidationError():
            return 400
        case UnauthorizedError():
            return 401
        case RequestTooLargeError():
            return 413
        case QueueFullError() | NotReadyError() | EngineDeadError():
            return 503
        case DeadlineExceededError():
            return 504
        case HTTPException():
            return error.status_code
        case _:
            return 500


def error_body(error: BaseException) -> ErrorBody:
    """What the client is told. An exception that nobody foresaw is logged, and its text kept from the client."""
    status = status_of(error)
    param = None
    match error:
        case ValidationError():
            message, param = _describe(error)
        case InvalidRequestError():
            message, param = str(error), error.param
        case HTTPException():
            message = str(error.detail)
        case JaxllmError():
            message = str(error)
            if isinstance(error, RequestFailedError):
                logger.error("a request failed in the engine: %s", message)
        case _:
            logger.error("unexpected error while serving a request", exc_info=error)
            message = "internal server error; the server's log has the details"
    return ErrorBody(ErrorInfo(message[:MAX_MESSAGE_CHARS], _TYPES.get(status, HTTPStatus(status).phrase), param, status))


def anthropic_error_body(error: BaseException) -> AnthropicErrorBody:
    """The same for clients of the Messages API."""
    info = error_body(error).error
    return AnthropicErrorBody(error=AnthropicErrorInfo(_ANTHROPIC_TYPES.get(info.code, "api_error"), info.message))


def error_response(error: BaseException, scope: Scope) -> Response:
    """The response for an exception, with Retry-After where trying again makes sense, in the form that its route's clients know."""
    status = status_of(error)
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    body = anthropic_error_body(error) if path.startswith("/v1/messages") else error_body(error)
    more: dict[str, str] = {}
    if isinstance(error, QueueFullError | NotReadyError):
        more["Retry-After"] = str(max(1, error.retry_after_s))
    if isinstance(error, RequestTooLargeError):
        # The rest of the body is not read: the connection cannot be used again.
        more["Connection"] = "close"
    if isinstance(error, UnauthorizedError):
        more["WWW-Authenticate"] = "Bearer"
    if isinstance(error, HTTPException) and error.headers:
        more.update(error.headers)
    return Response(msgspec.json.encode(body), status, more, media_type="application/json")


def _describe(error: ValidationError) -> tuple[str, str | None]:
    """The first errors of a validation, each with the field and the value at fault, and the first field's name."""
    found = error.errors(include_url=False, include_context=False)
    lines = []
    for item in found[:MAX_LISTED_ERRORS]:
        field = ".".join(map(str, item["loc"])) or "body"
        # The repr of a huge value would cost more than the request.
        value = item["input"]
        shown = f"{value!r:.200}" if isinstance(value, str | int | float | bool | None) else f"a {type(value).__name__}"
        text = item["msg"].removeprefix("Value error, ")
        lines.append((f"{field}: {text}" if item["type"] == "missing" else f"{field}: {text}, got {shown}")[:MAX_ERROR_CHARS])
    if len(found) > MAX_LISTED_ERRORS:
        lines.append(f"and {len(found) - MAX_LISTED_ERRORS} more errors")
    return "; ".join(lines), ".".join(map(str, found[0]["loc"]))[:MAX_ERROR_CHARS] or None


def install_error_handlers(app: FastAPI) -> None:
    """Turn every exception of a route into its error body."""

    async def handle(request: Request, error: Exception) -> Response:
        return error_response(error, request.scope)

    async def gone(request: Request, error: Exception) -> Response:
        # Never sent: nginx' number for "client closed request" keeps the access log truthful.
        return Response(status_code=499)

    for kind in (JaxllmError, ValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, handle)
    app.add_exception_handler(ClientDisconnected, gone)
