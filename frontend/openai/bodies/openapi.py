"""/openapi.json: FastAPI's skeleton of paths, with the schemas that msgspec derives from the Structs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.responses import Response

from ..errors import ErrorResponse

_REF = "#/components/schemas/{name}"
_ERRORS_OF_POSTS = {
    400: "A field cannot be used",
    401: "No API key of this server",
    404: "No such model",
    413: "The body is too large",
    415: "The body is not JSON",
    429: "No room now; try again",
    500: "The engine failed this request",
    503: "The server is about to start or to end",
}


def describe_route(
    summary: str | None,
    request: type[msgspec.Struct] | None,
    answer: type[msgspec.Struct],
    event: type[msgspec.Struct] | None = None,
    more: Mapping[int, type[msgspec.Struct]] | None = None,
) -> dict[str, Any]:
    """Keyword arguments of `add_api_route`: what goes in and out, without FastAPI's own parsing."""
    content: dict[str, Any] = {"application/json": {"schema": _ref(answer)}}
    if event is not None:
        content["text/event-stream"] = {"schema": {"description": f"Events; data: {event.__name__}"}}
    responses: dict[int, Any] = {200: {"description": "Success", "content": content}}
    if request is not None:
        for status, description in _ERRORS_OF_POSTS.items():
            responses[status] = _json_response(description, ErrorResponse)
    else:
        responses |= _errors_of_gets()
    for status, kind in (more or {}).items():
        responses[status] = _json_response("See the body", kind)
    extra: dict[str, Any] = {}
    if request is not None:
        extra["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _ref(request)}},
        }
    return {
        "summary": (summary or "").partition(". ")[0].removesuffix("."),
        "responses": responses,
        "response_class": Response,
        "response_model": None,
        "openapi_extra": extra,
    }


def describe_text_route(summary: str, media_type: str) -> dict[str, Any]:
    """As `describe_route`, for a GET whose answer is a text of that media type."""
    responses: dict[int, Any] = {200: {"description": "Success", "content": {media_type: {}}}}
    return {
        "summary": summary,
        "responses": responses | _errors_of_gets(),
        "response_class": Response,
        "response_model": None,
    }


def build_openapi(app: FastAPI, types: Iterable[type[msgspec.Struct]]) -> dict[str, Any]:
    """The document, for FastAPI's `app.openapi`. `types`: every Struct that the routes name."""
    document = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    for path in document["paths"].values():
        for operation in cast(dict[str, dict[str, Any]], path).values():
            operation["responses"].pop("422", None)  # FastAPI's own validation is not used
    _, schemas = msgspec.json.schema_components(
        sorted({*types, ErrorResponse}, key=_name_of), ref_template=_REF
    )
    components = document.setdefault("components", {})
    own = components.setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        own.pop(name, None)
    own.update(schemas)
    components["securitySchemes"] = {"apiKey": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{}, {"apiKey": []}]
    return document


def _errors_of_gets() -> dict[int, dict[str, Any]]:
    return {status: _json_response(_ERRORS_OF_POSTS[status], ErrorResponse) for status in (401, 503)}


def _ref(kind: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": _REF.format(name=kind.__name__)}


def _json_response(description: str, kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": _ref(kind)}}}


def _name_of(kind: type[msgspec.Struct]) -> str:
    return kind.__name__
