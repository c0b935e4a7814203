"""/openapi.json: FastAPI's skeleton of paths, with the schemas that msgspec derives from the Structs."""

from __future__ import annotations

import functools
import re
from collections.abc import Awaitable, Callable, Mapping
from types import UnionType
from typing import Any, cast, get_args

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.responses import Response

from ..errors import ErrorResponse, MessagesErrorResponse, is_messages_path

_SENTENCE_END = re.compile(r"\.(?:\s|$)")
_REF = "#/components/schemas/{name}"
_ERRORS_OF_POSTS = {
    400: "A field cannot be used",
    401: "No API key of this server",
    404: "No such model",
    408: "Its body came too slowly, or it was aborted or out of time",
    413: "The body is too large",
    415: "The body is not JSON",
    429: "No room now; try again",
    500: "The engine failed this request",
    503: "The server is about to start or to end",
}


class Routes:
    """Adds routes to an app, and makes the document of what goes in and out; FastAPI parses nothing."""

    def __init__(self, app: FastAPI, root_path: str = "") -> None:
        """`root_path`: what a proxy puts before every path."""
        self._app = app
        self._root_path = root_path
        self._types: set[Any] = {ErrorResponse}

    def add(
        self,
        path: str,
        endpoint: Callable[..., Awaitable[Response]],
        summary: str | None,
        answer: Any,
        *,
        name: str | None = None,
        request: type[msgspec.Struct] | UnionType | None = None,
        event: type[msgspec.Struct] | UnionType | None = None,
        more: Mapping[int, type[msgspec.Struct]] | None = None,
        method: str | None = None,
    ) -> None:
        """A POST if there is a `request`, else a GET, or `method`. `answer`: its type, or a media type.

        `summary`: its first sentence is shown. `event`: what a stream is made of. `more`: other answers.
        """
        content: dict[str, Any] = {answer: {}} if isinstance(answer, str) else self._describe_json(answer)
        if event is not None:
            kinds = cast(tuple[type[msgspec.Struct], ...], get_args(event) or (event,))
            self._types.update(kinds)
            names = ", ".join(kind.__name__ for kind in kinds)
            content["text/event-stream"] = {"schema": {"description": f"Events; data: {names}"}}
        responses: dict[int | str, Any] = {200: {"description": "Success", "content": content}}
        for status in (401, 503) if request is None else _ERRORS_OF_POSTS:
            content = self._describe_json(MessagesErrorResponse if is_messages_path(path) else ErrorResponse)
            responses[status] = {"description": _ERRORS_OF_POSTS[status], "content": content}
        for status, kind in (more or {}).items():
            responses[status] = {"description": "See the body", "content": self._describe_json(kind)}
        extra: dict[str, Any] = {}
        if request is not None:
            extra["requestBody"] = {"required": True, "content": self._describe_json(request)}
        self._app.add_api_route(
            path,
            endpoint,
            methods=[method or ("GET" if request is None else "POST")],
            name=name,
            summary=_SENTENCE_END.split(summary or "", maxsplit=1)[0],
            responses=responses,
            response_class=Response,
            response_model=None,
            openapi_extra=extra,
        )

    @functools.cached_property
    def document(self) -> dict[str, Any]:
        """/openapi.json, for FastAPI's `app.openapi`; made when it is first asked for."""
        app = self._app
        document = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes
        )
        for path in document["paths"].values():
            for operation in cast(dict[str, dict[str, Any]], path).values():
                operation["responses"].pop("422", None)  # FastAPI's own validation is not used
        types = sorted(self._types, key=str)
        _, schemas = msgspec.json.schema_components(types, ref_template=_REF)
        components = document.setdefault("components", {})
        own = components.setdefault("schemas", {})
        for name in ("HTTPValidationError", "ValidationError"):
            own.pop(name, None)
        own.update(schemas)
        components["securitySchemes"] = {"apiKey": {"type": "http", "scheme": "bearer"}}
        if self._root_path:
            document["servers"] = [{"url": self._root_path}]
        document["security"] = [{}, {"apiKey": []}]
        return document

    def _describe_json(self, kind: Any) -> dict[str, Any]:
        """Of a Struct, or of a type that is made of some."""
        if isinstance(kind, UnionType):
            inner = [self._describe_json(one)["application/json"]["schema"] for one in get_args(kind)]
            return {"application/json": {"schema": {"anyOf": inner}}}
        self._types.add(kind)
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            return {"application/json": {"schema": {"$ref": _REF.format(name=kind.__name__)}}}
        (schema,), _ = msgspec.json.schema_components([kind], ref_template=_REF)
        return {"application/json": {"schema": schema}}
