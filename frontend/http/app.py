"""The Starlette app over a process's models: routes, errors, /openapi.json. Knows no sockets or signals."""

from __future__ import annotations

import functools
import operator
import time
from collections.abc import Awaitable, Callable, Coroutine
from http import HTTPStatus
from importlib.metadata import version
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, Raw, UnsetType
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as AsgiMessage

from ...ipc.decoding import decode_json
from ...ipc.errors import QuireError, shorten
from ...ipc.params.request_options import MAX_REQUEST_ID_LENGTH
from .bodies import schema
from .bodies.openapi import Routes
from .bodies.parsing import parse_body, parse_request
from .caller import Caller
from .connections.auth import CALLER_KEY
from .dialects.ollama_models import add_routes as add_ollama_routes
from .dialects.responses_kept import add_routes as add_stored_responses_routes
from .dialects.route import PostRoute
from .dialects.table import ROUTES, check_request
from .dialects.tei import add_routes as add_tei_routes
from .engines.served_models import ServedModels
from .errors import ApiError, ErrorResponse, make_error_response, unavailable
from .headers import find_header
from .jobs.peers import PeerSockets
from .observe.http_counts import OTHER, HttpCounts
from .observe.live import add_routes as add_live_routes
from .observe.metrics import add_routes as add_metrics_routes
from .observe.server_info import add_health_routes, add_info_routes
from .stream import REQUEST_ID_HEADER, echo_request_id, respond, run_while_connected

_CLIENT_GONE = 499  # nginx's code; nobody reads it
_NOT_INVOKED = (
    "body: expected 'messages', 'prompt', 'input', 'text_1' or 'queries' with 'documents', or 'query'"
)
R = TypeVar("R")
Endpoint = Callable[[Request], Awaitable[Response]]
Parse = Callable[[bytes], R]
Handler = Callable[[R, Caller], Coroutine[Any, Any, Response]]
_INVOKED = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/score", "/v1/rerank")


def create_app(models: ServedModels, peers: PeerSockets | None = None) -> DirectRoutes:
    """All routes: the API's, those that say how the server is, and those that show the engine.

    peers: of a group, whose processes count requests together.
    """
    routes = Routes(models.parts.options.root_path)
    add_health_routes(routes, models, _find_caller)
    _add_model_routes(routes, models)
    endpoints = _add_post_routes(routes, models)
    add_tei_routes(routes, models)
    add_ollama_routes(routes, models)
    add_stored_responses_routes(routes, models, _find_caller)
    add_metrics_routes(routes, models, lambda: counts)
    add_live_routes(routes, models, _find_caller)
    add_info_routes(routes, models)

    async def show_document() -> Response:
        return Response(msgspec.json.encode(routes.document), media_type="application/json")

    routes.add_page("/openapi.json", show_document)
    paths = [(method, route.path) for route in routes.routes for method in route.methods or ()]
    counts = HttpCounts(paths) if peers is None else HttpCounts(paths, peers.counts_fd, peers.place)
    models.parts.responses.store.counts.write_to(counts.more)
    answers = dict.fromkeys((HTTPException, QuireError, Exception), _answer_error)
    app = Starlette(routes=routes.routes, exception_handlers=answers)
    return DirectRoutes(app, endpoints, counts, routes)


async def _answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException) and error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        error.headers = {"allow": ", ".join(sorted(_find_methods(request)))}
        error.detail = f"method={request.method!r}: expected {error.headers['allow']} with this path"
        if "access-control-request-method" in request.headers:
            error.detail += " (pages of other origins may ask with --allowed-origins)"
    elif isinstance(error, HTTPException) and error.status_code == HTTPStatus.NOT_FOUND:
        path = request.scope["path"]
        paths = {route.path for route in request.app.routes if isinstance(route, Route)}
        close = [other for other in (f"/v1{path}", path.removeprefix("/v1")) if other in paths]
        hint = f", did you mean {close[0]!r}?" if close else ""
        error.detail = f"path={shorten(path)}: not found{hint}: /openapi.json has this server's paths"
    return make_error_response(error, request.scope["path"])


def _find_methods(request: Request) -> set[str]:
    """All that the path takes; Starlette names those of its first route only."""
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    return {
        method
        for route in routes
        if route.matches(request.scope)[0] is not Match.NONE
        for method in route.methods or ()
    }


class DirectRoutes:
    """Calls the endpoint of a POST itself, which answers its errors itself.

    Starlette's way there is some calls deep, which a stream would hold for as long as it lasts.
    """

    def __init__(
        self, app: ASGIApp, endpoints: dict[str, Endpoint], counts: HttpCounts, routes: Routes
    ) -> None:
        self._app = app
        self._endpoints = endpoints
        self._counts = counts
        self.routes = routes  # as /openapi.json describes them
        self.body_paths = frozenset(endpoints)  # where a POST has a body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.monotonic()
        endpoint = None
        if scope["method"] == "POST":
            endpoint = self._endpoints.get(scope["path"])
        if endpoint is None:
            path, status = await self._call_app(scope, receive, send)
        else:
            response = await endpoint(Request(scope, receive))
            await response(scope, receive, send)
            path, status = scope["path"], response.status_code
        self._counts.note(scope["method"], path, status, time.monotonic() - began)

    async def _call_app(self, scope: Scope, receive: Receive, send: Send) -> tuple[str, int]:
        """The route's path and the answer's status."""
        status = _CLIENT_GONE

        def send_and_note(message: AsgiMessage) -> Awaitable[None]:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            return send(message)

        await self._app(scope, receive, send_and_note)
        route = scope.get("route")
        return getattr(route, "path", OTHER), status


def _add_post_routes(routes: Routes, models: ServedModels) -> dict[str, Endpoint]:
    """Routes of requests, as the dialects have them; returns their endpoints by path."""
    endpoints: dict[str, Endpoint] = {}
    handled: dict[str, tuple[Parse[Any], Handler[Any]]] = {}
    ignores = models.parts.options.unknown_fields == "ignore"
    for path, route in ROUTES.items():
        parse = functools.partial(parse_body, kind=route.body, ignores_unknown=ignores)
        handler = _make_handler(models, route)
        handled[path] = parse, handler
        endpoint = endpoints[path] = _make_endpoint(models, parse, handler)
        # For /openapi.json, and for other methods' 405.
        name, text = route.handler.__name__, route.handler.__doc__
        streams = "stream" in route.body.__struct_fields__
        routes.add(path, endpoint, text, name=name, request=route.body, streams=streams)
    path = "/abort_requests"  # names no model: ids of answers do not tell it
    parse = functools.partial(parse_body, kind=schema.AbortRequest)
    abort = endpoints[path] = _make_endpoint(models, parse, functools.partial(create_abort, models))
    name, text = create_abort.__name__, create_abort.__doc__
    routes.add(path, abort, text, schema.StatusResponse, name=name, request=schema.AbortRequest)
    endpoints["/invocations"] = _add_invocations(routes, models, handled)
    return endpoints


def _add_invocations(
    routes: Routes, models: ServedModels, handled: dict[str, tuple[Parse[Any], Handler[Any]]]
) -> Endpoint:
    """The route that is any of `handled`, which by path is what reads a body and what answers it."""

    def parse(body: bytes) -> tuple[msgspec.Struct, Handler[Any]]:
        parse_own, handler = handled[_find_invoked(body, models)]
        return parse_own(body), handler

    def handle(parsed: tuple[msgspec.Struct, Handler[Any]], caller: Caller) -> Coroutine[Any, Any, Response]:
        request, handler = parsed
        return handler(request, caller)

    endpoint = _make_endpoint(models, parse, handle)
    invoked = [ROUTES[path] for path in _INVOKED]
    kinds = functools.reduce(operator.or_, (route.body for route in invoked))
    text = "Answer a request of another route, as SageMaker's callers ask."
    routes.add("/invocations", endpoint, text, name="invocations", request=kinds, streams=True)
    return endpoint


class _InvokedFields(msgspec.Struct):
    """Those that tell what a body is; the values are not looked at."""

    model: str | None = None
    messages: Raw | UnsetType = UNSET
    prompt: Raw | UnsetType = UNSET
    input: Raw | UnsetType = UNSET
    text_1: Raw | UnsetType = UNSET
    queries: Raw | UnsetType = UNSET
    query: Raw | UnsetType = UNSET


def _find_invoked(body: bytes, models: ServedModels) -> str:
    """The path of the route. Raises ApiErrors."""
    try:
        fields = decode_json(body, _InvokedFields)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(
            HTTPStatus.BAD_REQUEST, f"body: expected JSON ({error})", code="invalid_json"
        ) from None
    if fields.prompt is not UNSET:
        return "/v1/completions"
    if fields.text_1 is not UNSET or fields.queries is not UNSET:
        return "/score"
    if fields.query is not UNSET:
        return "/v1/rerank"
    tasks = models.find(fields.model).facts.tasks
    if fields.messages is not UNSET and "generate" in tasks:
        return "/v1/chat/completions"
    if fields.messages is UNSET and fields.input is UNSET:
        raise ApiError(HTTPStatus.BAD_REQUEST, _NOT_INVOKED, code="missing_field")
    if "embed" in tasks:
        return "/v1/embeddings"
    return "/classify" if "classify" in tasks else "/pooling"


def _make_handler(models: ServedModels, route: PostRoute) -> Handler[Any]:
    """It answers by the model that the request names, which can do the route's task."""
    task = route.task if isinstance(route.task, str) else None

    def handle(request: Any, caller: Caller) -> Coroutine[Any, Any, Response]:
        name: str | None = getattr(request, "model", None)
        serving = models.find(name, task).serving
        check_request(route, serving.llm.facts, request)
        return route.handler(serving, request, caller)

    return handle


def _make_endpoint(models: ServedModels, parse: Parse[R], handler: Handler[R]) -> Endpoint:
    async def endpoint(http: Request) -> Response:
        caller = _find_caller(http)
        try:
            models.check_open()
            request = await parse_request(http, parse)
            caller = _read_own_name(request, caller)
            response = await run_while_connected(http.scope, handler(request, caller))
        except ClientDisconnect:
            return Response(status_code=_CLIENT_GONE)
        except Exception as error:
            response = make_error_response(error, http.scope["path"])
        if caller.request_id:
            echo_request_id(response, caller.request_id)
        return response

    return endpoint


def _read_own_name(request: object, caller: Caller) -> Caller:
    """What a body calls its request, where no header does."""
    named: str | None = getattr(request, "request_id", None)
    usable = named and not caller.request_id and named.isascii() and named.isprintable()
    return msgspec.structs.replace(caller, request_id=named) if usable else caller


def _find_caller(http: Request) -> Caller:
    """Who asks: by the API key, or by the address where there are no keys.

    That is the connection's: what a header says of it (X-Forwarded-For) anybody can write.
    """
    scope = http.scope
    caller: Caller = scope["state"][CALLER_KEY]
    named = find_header(scope["headers"], REQUEST_ID_HEADER).decode("latin-1")
    if named and len(named) <= MAX_REQUEST_ID_LENGTH and named.isprintable():
        caller = msgspec.structs.replace(caller, request_id=named)
    return caller.at(scope["client"][0] if scope["client"] else "")


async def create_abort(models: ServedModels, request: schema.AbortRequest, caller: Caller) -> Response:
    """End requests of this API key, without keys those of this server and address: each answer ends with
    what it has and finish_reason "abort".

    Ids that are unknown, finished or another's are ignored: nobody learns what another has asked.
    """
    engines = [serving.llm for serving in models.servings if serving.llm.is_running]
    for llm in engines:  # an id does not tell whose it is
        if not llm.is_recovering:
            llm.abort_named(request.request_ids, caller.tenant)
    if any(llm.is_recovering for llm in engines):
        raise unavailable("an engine is being restarted: try again", "recovering")
    return respond(schema.StatusResponse("ok"))


def _add_model_routes(routes: Routes, models: ServedModels) -> None:
    async def get_version() -> Response:
        return respond({"version": version("quire")})

    async def list_models() -> Response:
        models.check_open()
        cards = [models.make_card(served, name) for served in models.models for name in served.names]
        return respond({"object": "list", "data": cards})

    async def get_model(model: str) -> Response:
        models.check_open()
        names = [name for served in models.models for name in served.names]
        # A name that begins with a slash stands behind another one, and two are read as one.
        model = next((name for name in names if name == f"/{model}"), model)
        return respond(models.make_card(models.find(model), model))

    routes.add("/version", get_version, "Quire's version.", name="version")
    routes.add("/v1/models", list_models, "What is served.")
    routes.add("/v1/models/{model:path}", get_model, "One model.", more={404: ErrorResponse})
