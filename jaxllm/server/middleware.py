"""What happens to every HTTP exchange before and after the routes: keys, sizes, ids. Plain ASGI, so that streams cost nothing more."""

from __future__ import annotations

import hashlib
import os
import secrets
import uuid
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxllm.server.errors import RequestTooLargeError, UnauthorizedError, error_response

# Everything that generates, or changes what the server does.
GUARDED = (
    *("/v1", "/v2", "/inference", "/invocations", "/pooling", "/classify", "/score", "/rerank"),
    *("/tokenizer_info", "/reset_prefix_cache", "/start_profile", "/stop_profile"),
)


def header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)


class ApiKeyMiddleware:
    """Requests to `GUARDED` paths must bring one of the keys; OPTIONS is exempt, since browsers ask before they may send a key."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], root_path: str = ""):
        self._app = app
        # Digests: of equal length, so that the comparison's time tells nothing about the keys.
        self._digests = [hashlib.sha256(os.fsencode(key).strip()).digest() for key in keys]
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] != "OPTIONS" and self._guards(scope["path"]) and not self._knows(scope):
            error = UnauthorizedError("unauthorized: send a valid API key as 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'")
            await error_response(error, scope)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _guards(self, path: str) -> bool:
        return path.removeprefix(self._root_path).startswith(GUARDED) or path.startswith(GUARDED)

    def _knows(self, scope: Scope) -> bool:
        scheme, _, key = (header(scope, b"authorization") or b"").partition(b" ")
        if not key:
            # As clients of the Messages API send it.
            scheme, key = b"bearer", header(scope, b"x-api-key") or b""
        digest = hashlib.sha256(key.strip()).digest()
        found = False
        for known in self._digests:
            found |= secrets.compare_digest(digest, known)
        return found and scheme.lower() == b"bearer"


class BodyLimitMiddleware:
    """Refuses bodies above `limit` bytes: at once where the length is announced, else when they pass it."""

    def __init__(self, app: ASGIApp, limit: int):
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = header(scope, b"content-length")
        if announced is not None and announced.isdigit() and int(announced) > self._limit:
            await error_response(self._error(int(announced)), scope)(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > self._limit:
                    raise self._error(received)
            return message

        await self._app(scope, counted, send)

    def _error(self, size: int) -> RequestTooLargeError:
        return RequestTooLargeError(f"the body has {size} bytes or more; at most {self._limit} are taken (--max-request-body-size)")


class RequestIdMiddleware:
    """Adds X-Request-Id to every response: the request's own, or a new one."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = header(scope, b"x-request-id")
        if request_id is None:
            # The routes see the id too, so that the ids of response and header agree.
            request_id = uuid.uuid4().hex.encode()
            scope = {**scope, "headers": [*scope["headers"], (b"x-request-id", request_id)]}

        async def tagged(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"x-request-id", request_id)]}
            await send(message)

        await self._app(scope, receive, tagged)
