"""The layers around the routes, from the outermost in. A server without an option has no layer for it."""

from __future__ import annotations

from starlette.types import ASGIApp

from ..options import CorsOptions, ServerOptions
from ..stream import ID_HEADERS
from .auth import ApiKeyMiddleware
from .hosts import LocalHostMiddleware
from .listen import is_loopback
from .request_ids import RequestIdMiddleware


def wrap_routes(routes: ASGIApp, options: ServerOptions) -> ASGIApp:
    """The app that connections call."""
    app: ASGIApp = ApiKeyMiddleware(routes, options.api_key_hashes, options.server_id)
    is_for_browsers_here = options.uds is None and is_loopback(options.host)
    if is_for_browsers_here and not (options.api_key_hashes or options.allowed_hosts):
        app = LocalHostMiddleware(app)
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
