"""The OpenAPI document: routes read their bodies themselves, so their schemas are put together here."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from jaxllm.server.errors import ErrorBody

_REF = "#/components/schemas/{name}"
_requests: dict[str, type[BaseModel]] = {}
_responses: dict[str, type[msgspec.Struct]] = {"ErrorBody": ErrorBody}


def documented(request: type[BaseModel] | None, response: type[msgspec.Struct]) -> dict[str, Any]:
    """Arguments of a route decorator that document the body and the response."""

    def content(kind: type) -> dict[str, Any]:
        return {"application/json": {"schema": {"$ref": _REF.format(name=kind.__name__)}}}

    _responses[response.__name__] = response
    extra: dict[str, Any] = {"responses": {"200": {"description": "Success", "content": content(response)}}}
    if request is not None:
        _requests[request.__name__] = request
        extra["requestBody"] = {"required": True, "content": content(request)}
        extra["responses"]["4XX"] = {"description": "The request is at fault", "content": content(ErrorBody)}
    extra["responses"]["5XX"] = {"description": "The server is", "content": content(ErrorBody)}
    return {"openapi_extra": extra}


def install_openapi(app: FastAPI) -> None:
    """Serve the document with the schemas of bodies and responses in it."""

    def build() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, routes=app.routes, description=app.description)
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            _, bodies = models_json_schema(
                [(kind, "validation") for kind in _requests.values()], ref_template=_REF.replace("{name}", "{model}")
            )
            schemas.update(bodies["$defs"])
            schemas.update(msgspec.json.schema_components(list(_responses.values()), ref_template=_REF)[1])
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = build  # type: ignore[method-assign]
