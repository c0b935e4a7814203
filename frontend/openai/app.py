"""The FastAPI app over an AsyncLLM: routes, errors, /openapi.json. Knows no sockets and no signals."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from http import HTTPStatus
from importlib.metadata import version
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ...ipc.errors import QuireError
from ...ipc.messages import EngineSnapshot
from .bodies.docs_page import CONTENT_SECURITY_POLICY, render_docs
from .bodies.openapi import build_openapi, describe_route
from .bodies.parsing import parse_request
from .bodies.schema import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    CompletionRequest,
    CompletionResponse,
    DetokenizeRequest,
    DetokenizeResponse,
    ModelCard,
    ModelList,
    ResponsesRequest,
    StatusResponse,
    TokenizeRequest,
    TokenizeResponse,
    VersionResponse,
)
from .connections.auth import CALLER_KEY
from .endpoints.chat import create_chat_completion
from .endpoints.completions import create_completion
from .endpoints.responses import ResponseEvent, ResponsesResponse, create_response
from .endpoints.tokenize import create_detokenize, create_tokenize
from .errors import ErrorResponse, make_error_response
from .live import add_routes as add_live_routes
from .metrics import add_routes as add_metrics_routes
from .serving import Caller, Serving
from .stream import run_while_connected

_CLIENT_GONE = 499  # nginx's code; nobody reads it
_TYPES: tuple[type[msgspec.Struct], ...] = (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    CompletionRequest,
    CompletionResponse,
    DetokenizeRequest,
    DetokenizeResponse,
    EngineSnapshot,
    ModelCard,
    ModelList,
    ResponseEvent,
    ResponsesRequest,
    ResponsesResponse,
    StatusResponse,
    TokenizeRequest,
    TokenizeResponse,
    VersionResponse,
)
T = TypeVar("T", bound=msgspec.Struct)
Endpoint = Callable[[Request], Awaitable[Response]]
Handler = Callable[[Serving, T, Caller], Coroutine[Any, Any, Response]]


def create_app(serving: Serving) -> DirectRoutes:
    """All routes; those of other modules are in `_add_neighbours`."""
    app = FastAPI(
        title="Quire",
        version=version("quire"),
        description="OpenAI-compatible inference.",
        docs_url=None,  # FastAPI's loads its scripts from another server
        redoc_url=None,
    )
    app.add_exception_handler(HTTPException, _answer_error)
    app.add_exception_handler(QuireError, _answer_error)
    app.add_exception_handler(Exception, _answer_error)
    _add_status_routes(app, serving)
    _add_model_routes(app, serving)
    post = _PostRoutes(app, serving)
    post.add("/v1/completions", CompletionRequest, create_completion, CompletionResponse, CompletionResponse)
    post.add(
        "/v1/chat/completions",
        ChatCompletionRequest,
        create_chat_completion,
        ChatCompletion,
        ChatCompletionChunk,
    )
    post.add("/v1/responses", ResponsesRequest, create_response, ResponsesResponse, ResponseEvent)
    post.add("/tokenize", TokenizeRequest, create_tokenize, TokenizeResponse)
    post.add("/detokenize", DetokenizeRequest, create_detokenize, DetokenizeResponse)
    _add_neighbours(app, serving)
    schema: dict[str, Any] = {}

    def openapi() -> dict[str, Any]:
        if not schema:
            schema.update(build_openapi(app, _TYPES))
        return schema

    async def show_docs() -> Response:
        headers = {"content-security-policy": CONTENT_SECURITY_POLICY}
        return HTMLResponse(render_docs(openapi()), headers=headers)

    app.openapi = openapi
    app.add_api_route("/docs", show_docs, include_in_schema=False, response_class=HTMLResponse)
    return DirectRoutes(app, post.endpoints)


async def _answer_error(_request: Request, error: Exception) -> Response:
    return make_error_response(error)


def respond(body: msgspec.Struct, status: HTTPStatus = HTTPStatus.OK) -> Response:
    """A Struct as a JSON response."""
    return Response(msgspec.json.encode(body), status, media_type="application/json")


class DirectRoutes:
    """Calls the endpoint of a POST itself, which answers its errors itself.

    FastAPI's way there is a dozen calls deep with three exit stacks, which a stream would hold for as long as
    it lasts: 1,000 at once took 40 MB, 30 MB without it.
    """

    def __init__(self, app: ASGIApp, endpoints: dict[str, Endpoint]) -> None:
        self._app = app
        self._endpoints = endpoints
        self.body_paths = frozenset(endpoints)  # where a POST has a body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = None
        if scope["type"] == "http" and scope["method"] == "POST":
            endpoint = self._endpoints.get(scope["path"])
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        response = await endpoint(Request(scope, receive))
        await response(scope, receive, send)


class _PostRoutes:
    """Adds routes whose body is one of schema.py's Structs."""

    def __init__(self, app: FastAPI, serving: Serving) -> None:
        self._app = app
        self._serving = serving
        self.endpoints: dict[str, Endpoint] = {}

    def add(
        self,
        path: str,
        kind: type[T],
        handler: Handler[T],
        answer: type[msgspec.Struct],
        event: type[msgspec.Struct] | None = None,
    ) -> None:
        serving = self._serving

        async def endpoint(http: Request) -> Response:
            try:
                serving.check_open()
                request = await parse_request(http, kind, serving.options.limits.max_body_bytes)
                work = handler(serving, request, _find_caller(http))
                return await run_while_connected(http.receive, work)
            except ClientDisconnect:
                return Response(status_code=_CLIENT_GONE)
            except Exception as error:
                return make_error_response(error)

        self.endpoints[path] = endpoint
        self._app.add_api_route(  # for /openapi.json, and for other methods' 405
            path,
            endpoint,
            methods=["POST"],
            name=handler.__name__,
            **describe_route(handler.__doc__, kind, answer, event),
        )


def _find_caller(http: Request) -> Caller:
    """Who asks: by the API key, or by the address where there are no keys."""
    caller: Caller = http.scope["state"][CALLER_KEY]
    if caller.key_hash or http.client is None:
        return caller
    return msgspec.structs.replace(caller, address=http.client.host)


def _add_status_routes(app: FastAPI, serving: Serving) -> None:
    async def live() -> Response:
        return respond(StatusResponse("live"))

    async def ready() -> Response:
        if serving.is_draining or not serving.is_open or not serving.llm.is_running:
            status = "draining" if serving.is_draining else "loading" if not serving.is_open else "dead"
            return respond(StatusResponse(status), HTTPStatus.SERVICE_UNAVAILABLE)
        if serving.is_recovering:
            return respond(StatusResponse("recovering"), HTTPStatus.SERVICE_UNAVAILABLE)
        return respond(StatusResponse("ready"))

    async def get_version() -> Response:
        return respond(VersionResponse(version("quire")))

    routes: list[tuple[str, Callable[[], Awaitable[Response]], str, type[msgspec.Struct]]] = [
        ("/live", live, "The process answers.", StatusResponse),
        ("/ready", ready, "New requests are taken; 503 while they are not.", StatusResponse),
        ("/health", ready, "As /ready.", StatusResponse),
        ("/version", get_version, "Quire's version.", VersionResponse),
    ]
    for path, endpoint, summary, answer in routes:
        more = {503: StatusResponse} if endpoint is ready else {}
        app.add_api_route(
            path, endpoint, methods=["GET"], name=path[1:], **describe_route(summary, None, answer, more=more)
        )


def _add_model_routes(app: FastAPI, serving: Serving) -> None:
    def make_card() -> ModelCard:
        max_model_len = serving.llm.facts.max_model_len
        return ModelCard(id=serving.model_id, created=serving.created, max_model_len=max_model_len)

    async def list_models() -> Response:
        serving.check_open()
        return respond(ModelList(data=[make_card()]))

    async def get_model(model: str) -> Response:
        serving.check_open()
        serving.check_model(model)
        return respond(make_card())

    app.add_api_route(
        "/v1/models", list_models, methods=["GET"], **describe_route("What is served.", None, ModelList)
    )
    app.add_api_route(
        "/v1/models/{model:path}",
        get_model,
        methods=["GET"],
        **describe_route("One model.", None, ModelCard, more={404: ErrorResponse}),
    )


def _add_neighbours(app: FastAPI, serving: Serving) -> None:
    """Routes of the modules that show the engine: /metrics, and the page with its stats."""
    add_metrics_routes(app, serving.llm)
    feed = add_live_routes(app, serving.llm, serving.options.limits)
    serving.on_drain.append(feed.close)
