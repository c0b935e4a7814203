"""The FastAPI app over a process's models: routes, errors, /openapi.json. Knows no sockets and no signals."""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable, Coroutine
from http import HTTPStatus
from importlib.metadata import version
from types import UnionType
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as AsgiMessage

from ...ipc.errors import QuireError, shorten
from ...ipc.messages import MAX_REQUEST_ID_LENGTH
from .access.http_counts import OTHER, HttpCounts
from .bodies.chat_answers import ChatCompletion, ChatCompletionChunk
from .bodies.docs_page import CONTENT_SECURITY_POLICY, render_docs
from .bodies.messages import CountTokensRequest, Message, MessageEvent, MessagesRequest, TokenCount
from .bodies.openapi import Routes
from .bodies.parsing import parse_body, parse_leniently, parse_request
from .bodies.pooling import (
    AnyRerankRequest,
    ClassifyRequest,
    ClassifyResponse,
    CohereEmbedRequest,
    CohereEmbedResponse,
    EmbeddingRequest,
    EmbeddingResponse,
    PoolingRequest,
    PoolingResponse,
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
    SimilarityRequest,
    TeiEmbedRequest,
    TeiRank,
)
from .bodies.responses import ResponseEvent, ResponsesRequest, ResponsesResponse
from .bodies.schema import (
    AbortRequest,
    ChatCompletionRequest,
    CompletionRequest,
    CompletionResponse,
    DetokenizeRequest,
    DetokenizeResponse,
    ModelCard,
    ModelList,
    StatusResponse,
    TokenizeRequest,
    TokenizeResponse,
    VersionResponse,
)
from .chat.chat import create_chat_completion
from .connections.auth import CALLER_KEY
from .endpoints.abort import create_abort
from .endpoints.completions import create_completion
from .endpoints.invocations import find_invoked
from .endpoints.tokenize import create_detokenize, create_tokenize
from .engines.served_models import ServedModels
from .errors import MESSAGES_PATH, ErrorResponse, make_error_response
from .headers import find_header
from .health import add_routes as add_health_routes
from .live import add_routes as add_live_routes
from .messages.messages import count_message_tokens, create_message
from .metrics import add_routes as add_metrics_routes
from .pooling.cohere import create_cohere_embedding
from .pooling.embeddings import create_classification, create_embedding, create_pooling
from .pooling.ranks import create_any_rerank, create_cohere_rerank, create_rerank
from .pooling.scores import create_score
from .pooling.tasks import check_task, find_task
from .pooling.tei import add_routes as add_tei_routes
from .pooling.tei import create_similarity, create_tei_embedding
from .responses.create import create_response
from .responses.peers import PeerSockets
from .responses.stored import add_routes as add_stored_responses_routes
from .server_info import add_routes as add_server_info_routes
from .serving import Caller, Serving
from .stream import REQUEST_ID_HEADER, echo_request_id, respond, run_while_connected

_CLIENT_GONE = 499  # nginx's code; nobody reads it
T = TypeVar("T", bound=msgspec.Struct)
R = TypeVar("R")
Endpoint = Callable[[Request], Awaitable[Response]]
Parse = Callable[[bytes], R]
Handler = Callable[[R, Caller], Coroutine[Any, Any, Response]]
ModelHandler = Callable[[Serving, T, Caller], Coroutine[Any, Any, Response]]


def create_app(models: ServedModels, peers: PeerSockets | None = None) -> DirectRoutes:
    """All routes: the API's, those that say how the server is, and those that show the engine.

    peers: of a group, whose processes count requests together.
    """
    app = FastAPI(
        title="Quire",
        version=version("quire"),
        description="OpenAI-compatible inference.",
        docs_url=None,  # FastAPI's loads its scripts from another server
        redoc_url=None,
    )
    for kind in (HTTPException, QuireError, Exception):
        app.add_exception_handler(kind, _answer_error)
    routes = Routes(app, models.parts.options.root_path)
    add_health_routes(routes, models)
    _add_version_route(routes)
    _add_model_routes(routes, models)
    endpoints = _add_post_routes(routes, models)
    add_tei_routes(routes, models)
    add_stored_responses_routes(routes, models, _find_caller)
    add_metrics_routes(routes, models, lambda: counts)
    add_live_routes(app, routes, models)
    add_server_info_routes(routes, models)

    async def show_docs() -> Response:
        headers = {"content-security-policy": CONTENT_SECURITY_POLICY}
        return HTMLResponse(render_docs(routes.document), headers=headers)

    app.openapi = lambda: routes.document
    app.add_api_route("/docs", show_docs, include_in_schema=False, response_class=HTMLResponse)
    found = [route for route in app.routes if isinstance(route, Route)]
    paths = [(method, route.path) for route in found for method in route.methods or ()]
    counts = HttpCounts(paths) if peers is None else HttpCounts(paths, peers.counts_fd, peers.place)
    models.parts.responses.store.counts.write_to(counts.more)
    return DirectRoutes(app, endpoints, counts, routes)


async def _answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException) and error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        error.headers = {"allow": ", ".join(sorted(_find_methods(request)))}
        error.detail = f"method={request.method!r}: {error.headers['allow']} with this path"
    elif isinstance(error, HTTPException) and error.status_code == HTTPStatus.NOT_FOUND:
        error.detail = f"path={shorten(request.scope['path'])}: not found: /docs has this server's paths"
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

    FastAPI's way there is a dozen calls deep with three exit stacks, which a stream would hold for as long as
    it lasts: 1,000 at once took 40 MB, 30 MB without it.
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
    """Routes whose body is one of schema.py's Structs; returns their endpoints by path."""
    endpoints: dict[str, Endpoint] = {}
    handled: dict[str, tuple[Parse[Any], Handler[Any]]] = {}
    parse_kind = parse_leniently if models.parts.options.unknown_fields == "ignore" else parse_body

    def add(
        path: str,
        kind: type[T],
        handler: ModelHandler[T],
        answer: Any,
        event: type[msgspec.Struct] | UnionType | None = None,
    ) -> None:
        by_model = _make_handler(models, handler, find_task(path))
        parse = functools.partial(parse_kind, kind=kind)
        handled[path] = parse, by_model
        endpoint = endpoints[path] = _make_endpoint(models, parse, by_model)
        # For /openapi.json, and for other methods' 405.
        name = handler.__name__
        routes.add(path, endpoint, handler.__doc__, answer, name=name, request=kind, event=event)

    add("/v1/completions", CompletionRequest, create_completion, CompletionResponse, CompletionResponse)
    path = "/v1/chat/completions"
    add(path, ChatCompletionRequest, create_chat_completion, ChatCompletion, ChatCompletionChunk)
    add("/v1/responses", ResponsesRequest, create_response, ResponsesResponse, ResponseEvent)
    add(MESSAGES_PATH, MessagesRequest, create_message, Message, MessageEvent)
    path = f"{MESSAGES_PATH}/count_tokens"
    add(path, CountTokensRequest, count_message_tokens, TokenCount)
    add("/v1/embeddings", EmbeddingRequest, create_embedding, EmbeddingResponse)
    add("/v2/embed", CohereEmbedRequest, create_cohere_embedding, CohereEmbedResponse)
    add("/embed", TeiEmbedRequest, create_tei_embedding, list[list[float]])
    add("/similarity", SimilarityRequest, create_similarity, list[float])
    add("/rerank", AnyRerankRequest, create_any_rerank, RerankResponse | list[TeiRank])
    add("/v1/rerank", RerankRequest, create_rerank, RerankResponse)
    add("/v2/rerank", RerankRequest, create_cohere_rerank, RerankResponse)
    for path in ("/score", "/v1/score"):
        add(path, ScoreRequest, create_score, ScoreResponse)
    add("/classify", ClassifyRequest, create_classification, ClassifyResponse)
    add("/pooling", PoolingRequest, create_pooling, PoolingResponse)
    add("/tokenize", TokenizeRequest, create_tokenize, TokenizeResponse)
    add("/detokenize", DetokenizeRequest, create_detokenize, DetokenizeResponse)
    path = "/abort_requests"  # names no model: ids of answers do not tell it
    parse = functools.partial(parse_body, kind=AbortRequest)
    abort = endpoints[path] = _make_endpoint(models, parse, functools.partial(create_abort, models))
    name, text = create_abort.__name__, create_abort.__doc__
    routes.add(path, abort, text, StatusResponse, name=name, request=AbortRequest)
    endpoints["/invocations"] = _add_invocations(routes, models, handled)
    return endpoints


def _add_invocations(
    routes: Routes, models: ServedModels, handled: dict[str, tuple[Parse[Any], Handler[Any]]]
) -> Endpoint:
    """The route that is any of `handled`, which by path is what reads a body and what answers it."""

    def parse(body: bytes) -> tuple[msgspec.Struct, Handler[Any]]:
        parse_own, handler = handled[find_invoked(body, models)]
        return parse_own(body), handler

    def handle(asked: tuple[msgspec.Struct, Handler[Any]], caller: Caller) -> Coroutine[Any, Any, Response]:
        request, handler = asked
        return handler(request, caller)

    endpoint = _make_endpoint(models, parse, handle)
    kinds = CompletionRequest | ChatCompletionRequest | EmbeddingRequest | ScoreRequest | RerankRequest
    text = "Answer a request of another route, as SageMaker's callers ask."
    answers = CompletionResponse | ChatCompletion | EmbeddingResponse | ScoreResponse | RerankResponse
    routes.add("/invocations", endpoint, text, answers, name="invocations", request=kinds)
    return endpoint


def _make_handler(models: ServedModels, handler: ModelHandler[T], task: str | None) -> Handler[T]:
    """It answers by the model that the request names, which can do the route's task."""

    def handle(request: T, caller: Caller) -> Coroutine[Any, Any, Response]:
        name: str | None = getattr(request, "model", None)
        serving = models.find(name, task).serving
        if task is not None:
            check_task(serving.llm.facts, task)
        return handler(serving, request, caller)

    return handle


def _make_endpoint(models: ServedModels, parse: Parse[R], handler: Handler[R]) -> Endpoint:
    max_body_bytes = models.parts.options.limits.max_body_bytes

    async def endpoint(http: Request) -> Response:
        caller = _find_caller(http)
        try:
            models.check_open()
            request = await parse_request(http, parse, max_body_bytes)
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
    """Who asks: by the API key, or by the address where there are no keys."""
    scope = http.scope
    caller: Caller = scope["state"][CALLER_KEY]
    named = find_header(scope["headers"], REQUEST_ID_HEADER).decode("latin-1")
    if named and len(named) <= MAX_REQUEST_ID_LENGTH and named.isprintable():
        caller = msgspec.structs.replace(caller, request_id=named)
    if caller.key_hash or not scope["client"]:
        return caller
    return msgspec.structs.replace(caller, address=scope["client"][0])


def _add_version_route(routes: Routes) -> None:
    async def get_version() -> Response:
        return respond(VersionResponse(version("quire")))

    routes.add("/version", get_version, "Quire's version.", VersionResponse, name="version")


def _add_model_routes(routes: Routes, models: ServedModels) -> None:
    async def list_models() -> Response:
        models.check_open()
        return respond(
            ModelList(data=[models.make_card(one, name) for one in models.models for name in one.names])
        )

    async def get_model(model: str) -> Response:
        models.check_open()
        return respond(models.make_card(models.find(model), model))

    routes.add("/v1/models", list_models, "What is served.", ModelList)
    routes.add("/v1/models/{model:path}", get_model, "One model.", ModelCard, more={404: ErrorResponse})
