"""The layers around the routes, from the outermost in. A server without an option has no layer for it."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ....ipc.params.request_options import MAX_REQUEST_ID_LENGTH
from ..headers import find_header
from ..options import CorsOptions, ServerOptions
from ..stream import ID_HEADERS, REQUEST_ID_HEADER
from .auth import ApiKeyMiddleware

# X-Request-Id in every answer: what the caller calls its request, or a name that is made here.


class RequestIdMiddleware:
    """Puts the header into answers in place of what else may stand there."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        named = find_header(scope["headers"], REQUEST_ID_HEADER)
        is_usable = (
            named and len(named) <= MAX_REQUEST_ID_LENGTH and named.isascii() and named.decode().isprintable()
        )
        request_id = named if is_usable else uuid.uuid4().hex.encode()

        def send_named(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                others = [field for field in message.get("headers", ()) if field[0] != REQUEST_ID_HEADER]
                message["headers"] = [*others, (REQUEST_ID_HEADER, request_id)]
            return send(message)

        await self._app(scope, receive, send_named)


def wrap_routes(routes: ASGIApp, options: ServerOptions) -> ASGIApp:
    """The app that connections call."""
    app: ASGIApp = ApiKeyMiddleware(routes, options.api_key_hashes, options.server_id)
    if options.cors is not None:  # outside of the keys: a browser's question before the request has none
        app = _allow_origins(app, options.cors)
    return RequestIdMiddleware(app) if options.enable_request_id_headers else app


def _allow_origins(app: ASGIApp, cors: CorsOptions) -> ASGIApp:
    from starlette.middleware.cors import CORSMiddleware

    return CORSMiddleware(
        app,
        allow_origins=cors.origins,
        allow_methods=cors.methods,
        allow_headers=cors.headers,
        allow_credentials=cors.allows_credentials,
        expose_headers=[*(name.decode() for name in ID_HEADERS), "retry-after"],
    )
