"""Reading a JSON body: anything that is not the JSON that we can take is the client's error, never ours."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from jaxllm.errors import InvalidRequestError
from jaxllm.server.errors import ClientDisconnected
from jaxllm.server.protocol import ApiRequest
from jaxllm.server.state import ServerState

MAX_NESTING = 128

Model = TypeVar("Model", bound=ApiRequest)


async def read_body(request: Request, model: type[Model]) -> Model:
    """Read and validate the request's body.

    Raises:
        InvalidRequestError, pydantic.ValidationError: wrong content type, malformed or too deeply nested JSON, or a field at fault, the
            model among them.
    """
    media_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if media_type != "application/json":
        raise InvalidRequestError(f"the content type must be application/json, got {media_type or 'none'!r}")
    body = model.model_validate(await read_json(request))
    body.check()
    state: ServerState = request.app.state.server
    state.serving.model_name(body.model)
    return body


async def read_json(request: Request) -> Any:
    """The request's body, whatever type it says it has. Raises InvalidRequestError where it is no JSON of ours."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise InvalidRequestError(f"the content encoding {encoding!r} is not supported; send the body as it is")
    try:
        raw = await request.body()
    except ClientDisconnect:
        raise ClientDisconnected from None
    return decode_json(raw)


def decode_json(raw: bytes) -> Any:
    """Strict JSON (no NaN, no Infinity, no bytes that are not UTF-8), nested at most `MAX_NESTING` levels deep."""
    try:
        value = msgspec.json.decode(raw)
    except RecursionError:
        raise InvalidRequestError(f"the JSON body is nested more than {MAX_NESTING} levels deep") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        hint = "; NaN and Infinity are not JSON" if b"NaN" in raw or b"Infinity" in raw else ""
        raise InvalidRequestError(f"the body is not valid JSON: {error}{hint}") from None
    # Counting brackets is a quick way to see that most bodies cannot be deep.
    if raw.count(b"[") + raw.count(b"{") > MAX_NESTING and _depth(value) > MAX_NESTING:
        raise InvalidRequestError(f"the JSON body is nested more than {MAX_NESTING} levels deep")
    return value


def _depth(value: Any) -> int:
    """Levels of lists and objects, counted without recursion."""
    depth, level = 0, [value]
    while level:
        depth += 1
        inner: list[Any] = []
        for item in level:
            children = item.values() if type(item) is dict else item if type(item) is list else ()
            inner.extend(child for child in children if type(child) in (dict, list))
        level = inner
    return depth
