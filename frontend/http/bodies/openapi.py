"""The server's routes, and /openapi.json: their paths with the schemas that msgspec derives from the Structs.

Requests are described whole. Of answers clients have types of their own, and tests/golden/dialects has
examples.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Awaitable, Callable, Mapping
from importlib.metadata import version
from types import UnionType
from typing import Any, get_args

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from ....ipc.protocol.rights import check_route, list_open
from ..errors import ErrorResponse, find_error_type, is_ollama_path

_SENTENCE_END = re.compile(r"\.(?:\s|$)")
_REF = "#/components/schemas/{name}"
_ERRORS_OF_POSTS = {
    400: "A field cannot be used",
    401: "No API key of this server",
    404: "No such model",
    408: "Its body came too slowly, or it was aborted or out of time",
    413: "The body is too large",
    415: "The body is not JSON, or is packed in a way that is not known",
    429: "No room now; try again",
    500: "The engine failed this request",
    503: "The server is about to start or to end",
}
Endpoint = Callable[..., Awaitable[Response]]


class _OneRoute(Route):
    """Takes one method, and HEAD with GET; is `route` in the scope of what it answers."""

    def __init__(self, path: str, endpoint: Endpoint, method: str, name: str) -> None:
        self.parameters = inspect.signature(endpoint).parameters
        self._call = endpoint
        super().__init__(path, self._answer, methods=[method], name=name)  # adds HEAD to GET

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child_scope = super().matches(scope)
        return match, {**child_scope, "route": self}

    async def _answer(self, request: Request) -> Response:
        arguments: dict[str, Any] = {**request.query_params, **request.path_params, "http": request}
        return await self._call(**{name: arguments[name] for name in self.parameters if name in arguments})


class Routes:
    """A server's routes, and the document of what goes in and out.

    An endpoint's parameters are strings, by name from the path or, with a default, from the query; `http` is
    the Request.
    """

    def __init__(self, root_path: str = "") -> None:
        """`root_path`: what a proxy puts before every path."""
        self.routes: list[Route] = []
        self._root_path = root_path
        self._paths: dict[str, dict[str, Any]] = {}
        self._types: set[Any] = {ErrorResponse}

    def add_page(self, path: str, endpoint: Endpoint, method: str = "GET") -> None:
        """What the document does not name."""
        check_route(path)
        self.routes.append(_OneRoute(path, endpoint, method, endpoint.__name__))

    def add(
        self,
        path: str,
        endpoint: Endpoint,
        summary: str | None,
        answer: Any = "application/json",
        *,
        name: str | None = None,
        request: type[msgspec.Struct] | UnionType | None = None,
        streams: bool = False,
        more: Mapping[int, type[msgspec.Struct]] | None = None,
        method: str | None = None,
    ) -> None:
        """A POST if there is a `request`, else a GET, or `method`. `answer`: its type, or a media type.

        `summary`: its first sentence is shown; None: that of the endpoint's docstring. `streams`: the answer
        may be a stream. `more`: other answers.
        """
        check_route(path)
        content: dict[str, Any] = {answer: {}} if isinstance(answer, str) else self._describe_json(answer)
        if streams:
            content["application/x-ndjson" if is_ollama_path(path) else "text/event-stream"] = {}
        responses: dict[str, Any] = {"200": {"description": "Success", "content": content}}
        for status in (401, 503) if request is None else _ERRORS_OF_POSTS:
            content = self._describe_json(find_error_type(path))
            responses[str(status)] = {"description": _ERRORS_OF_POSTS[status], "content": content}
        for status, kind in (more or {}).items():
            responses[str(status)] = {"description": "See the body", "content": self._describe_json(kind)}
        is_open = path in list_open()
        if is_open:
            del responses["401"]
        method = method or ("GET" if request is None else "POST")
        route = _OneRoute(path, endpoint, method, name or endpoint.__name__)
        operation: dict[str, Any] = {
            "summary": _SENTENCE_END.split(summary or endpoint.__doc__ or "", maxsplit=1)[0],
            "operationId": re.sub(r"\W", "_", f"{route.name}{route.path_format}_{method.lower()}"),
            "responses": responses,
        }
        if parameters := [
            {
                "name": parameter,
                "in": "path" if parameter in route.param_convertors else "query",
                "required": parameter in route.param_convertors,
                "schema": {"type": "string"},
            }
            for parameter in route.parameters
            if parameter != "http"
        ]:
            operation["parameters"] = parameters
        if request is not None:
            self._types.update(getattr(request, "CHECKED_LATER", ()))  # kinds that msgspec does not see in it
            operation["requestBody"] = {"required": True, "content": self._describe_json(request)}
        if is_open:
            operation["security"] = []
        self.routes.append(route)
        self._paths.setdefault(route.path_format, {})[method.lower()] = operation

    @functools.cached_property
    def document(self) -> dict[str, Any]:
        """/openapi.json; made when it is first asked for."""
        types = sorted(self._types, key=str)
        _, schemas = msgspec.json.schema_components(types, ref_template=_REF)
        keys = {"apiKey": {"type": "http", "scheme": "bearer"}}
        document: dict[str, Any] = {
            "openapi": "3.1.0",
            "info": {
                "title": "Quire",
                "description": "OpenAI-compatible inference.",
                "version": version("quire"),
            },
            "paths": self._paths,
            "components": {"schemas": schemas, "securitySchemes": keys},
            "security": [{}, {"apiKey": []}],
        }
        return document | ({"servers": [{"url": self._root_path}]} if self._root_path else {})

    def _describe_json(self, kind: Any) -> dict[str, Any]:
        """Of a Struct, or of a type that is made of some."""
        if isinstance(kind, UnionType):
            inner = [self._describe_json(member)["application/json"]["schema"] for member in get_args(kind)]
            return {"application/json": {"schema": {"anyOf": inner}}}
        self._types.add(kind)
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            return {"application/json": {"schema": {"$ref": _REF.format(name=kind.__name__)}}}
        (schema,), _ = msgspec.json.schema_components([kind], ref_template=_REF)
        return {"application/json": {"schema": schema}}
