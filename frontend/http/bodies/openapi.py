"""The server's routes, and /openapi.json: their paths with the schemas that msgspec derives from the Structs.

/docs: the same as one page without scripts, so that it needs no network.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import inspect
import re
from collections.abc import Awaitable, Callable, Mapping
from html import escape
from importlib.metadata import version
from types import UnionType
from typing import Any, cast, get_args

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from ....ipc.protocol.rights import check_route
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
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem}
body{margin:2rem auto;padding:0 1rem;color:#222;background:#fff}
h2{font-size:1rem;margin:2rem 0 .3rem;font-family:ui-monospace,monospace}
table{border-collapse:collapse;width:100%;font-size:.9rem}
td,th{text-align:left;vertical-align:top;padding:.2rem .6rem;border-bottom:1px solid #ddd}
code{font-family:ui-monospace,monospace}
@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}td,th{border-color:#444}a{color:#8bf}}
"""
_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
CONTENT_SECURITY_POLICY = f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; frame-ancestors 'none'"
_TYPE_WORDS = {"string": "text", "array": "list", "boolean": "true or false"}
Endpoint = Callable[..., Awaitable[Response]]
_NOTES = {"stream": "answer as server-sent events", "model": "the served model's name; it may be left out"}


class _OneRoute(Route):
    """Takes one method (Starlette adds HEAD to GET), and is `route` in the scope of what it answers."""

    def __init__(self, path: str, endpoint: Endpoint, method: str, name: str) -> None:
        self.parameters = inspect.signature(endpoint).parameters
        self._call = endpoint
        super().__init__(path, self._answer, methods=[method], name=name)
        self.methods = {method}

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, found = super().matches(scope)
        return match, {**found, "route": self}

    async def _answer(self, request: Request) -> Response:
        given: dict[str, Any] = {**request.query_params, **request.path_params, "http": request}
        return await self._call(**{name: given[name] for name in self.parameters if name in given})


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

    def add_page(self, path: str, endpoint: Endpoint) -> None:
        """A GET that the document does not name."""
        check_route(path)
        self.routes.append(_OneRoute(path, endpoint, "GET", endpoint.__name__))

    def add(
        self,
        path: str,
        endpoint: Endpoint,
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

        `summary`: its first sentence is shown; None: that of the endpoint's docstring. `event`: what a stream
        is made of. `more`: other answers.
        """
        check_route(path)
        content: dict[str, Any] = {answer: {}} if isinstance(answer, str) else self._describe_json(answer)
        if event is not None:
            kinds = cast(tuple[type[msgspec.Struct], ...], get_args(event) or (event,))
            self._types.update(kinds)
            names = ", ".join(kind.__name__ for kind in kinds)
            content["text/event-stream"] = {"schema": {"description": f"Events; data: {names}"}}
        responses: dict[str, Any] = {"200": {"description": "Success", "content": content}}
        for status in (401, 503) if request is None else _ERRORS_OF_POSTS:
            content = self._describe_json(MessagesErrorResponse if is_messages_path(path) else ErrorResponse)
            responses[str(status)] = {"description": _ERRORS_OF_POSTS[status], "content": content}
        for status, kind in (more or {}).items():
            responses[str(status)] = {"description": "See the body", "content": self._describe_json(kind)}
        method = method or ("GET" if request is None else "POST")
        route = _OneRoute(path, endpoint, method, name or endpoint.__name__)
        operation: dict[str, Any] = {
            "summary": _SENTENCE_END.split(summary or endpoint.__doc__ or "", maxsplit=1)[0],
            "operationId": re.sub(r"\W", "_", f"{route.name}{route.path_format}_{method.lower()}"),
            "responses": responses,
        }
        if parameters := [
            {
                "name": one,
                "in": "path" if one in route.param_convertors else "query",
                "required": one in route.param_convertors,
                "schema": {"type": "string"},
            }
            for one in route.parameters
            if one != "http"
        ]:
            operation["parameters"] = parameters
        if request is not None:
            operation["requestBody"] = {"required": True, "content": self._describe_json(request)}
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
            inner = [self._describe_json(one)["application/json"]["schema"] for one in get_args(kind)]
            return {"application/json": {"schema": {"anyOf": inner}}}
        self._types.add(kind)
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            return {"application/json": {"schema": {"$ref": _REF.format(name=kind.__name__)}}}
        (schema,), _ = msgspec.json.schema_components([kind], ref_template=_REF)
        return {"application/json": {"schema": schema}}


def render_docs(document: dict[str, Any]) -> str:
    """The page: every route with its fields and its answers."""
    schemas: dict[str, Any] = document["components"]["schemas"]
    routes = [
        _render_route(method, path, operation, schemas)
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]
    info = document["info"]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(info["title"])}</title>'
        f"<style>{_STYLE}</style><h1>{escape(info['title'])} {escape(info['version'])}</h1>"
        f'<p>{escape(info["description"])} The whole description for programs: <a href="openapi.json">'
        f"/openapi.json</a>. A field that is not listed is refused (see --unknown-fields).</p>"
        f"{''.join(routes)}</html>"
    )


def _render_route(method: str, path: str, operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    fields = ""
    if body and "anyOf" in body:
        fields = f"<p>Takes {escape(describe_type(body))}</p>"
    elif body:
        fields = _render_fields(schemas[_name_of(body)])
    answers = ", ".join(
        f"{status} {escape(answer.get('description', ''))}"
        for status, answer in operation["responses"].items()
    )
    return (
        f"<h2>{method.upper()} {escape(path)}</h2><p>{escape(operation.get('summary', ''))}</p>"
        f"{fields}<p>Answers: {answers}</p>"
    )


def _render_fields(schema: dict[str, Any]) -> str:
    required = set(schema.get("required", ()))
    rows = [
        f"<tr><td><code>{escape(name)}</code><td>{escape(describe_type(field))}"
        f"<td>{'required' if name in required else ''}<td>{escape(_NOTES.get(name, ''))}"
        for name, field in sorted(
            schema.get("properties", {}).items(), key=lambda item: item[0] not in required
        )
    ]
    return f"<table>{''.join(rows)}</table>"


def describe_type(field: dict[str, Any]) -> str:
    """A field's type and range in words: 'integer 1 to 128', 'text or list of text'."""
    if "anyOf" in field:
        kinds = [describe_type(one) for one in field["anyOf"] if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "$ref" in field:
        return _name_of(field)
    kind = str(field.get("type", "anything"))
    kind = _TYPE_WORDS.get(kind, kind)
    if kind == "list" and field.get("items"):
        kind = f"list of {describe_type(field['items'])}"
    low = field.get("minimum", field.get("exclusiveMinimum"))
    high = field.get("maximum", field.get("exclusiveMaximum"))
    if low is not None:
        kind += f", {'above' if 'exclusiveMinimum' in field else 'from'} {low:,}"
    return kind if high is None else f"{kind} to {high:,}"


def _name_of(reference: dict[str, Any]) -> str:
    return str(reference["$ref"]).rpartition("/")[2]
