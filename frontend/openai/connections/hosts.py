"""Whom a server without API keys takes requests for: names of this machine only.

A web page can make its own name lead to 127.0.0.1 (DNS rebinding), and the browser then lets it read what
this server answers. The Host header still has the page's name, so that is what is checked.
"""

from __future__ import annotations

import ipaddress
from http import HTTPStatus

from starlette.types import ASGIApp, Receive, Scope, Send

from ....ipc.errors import shorten
from ..errors import ApiError, make_error_response
from .listen import LOCAL_NAME


class LocalHostMiddleware:
    """Answers 403 to requests for a host that is neither localhost nor an IP address."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = next((value for name, value in scope.get("headers", ()) if name == b"host"), b"")
        if scope["type"] == "http" and not is_local_name(host.decode("latin-1")):
            error = ApiError(
                HTTPStatus.FORBIDDEN,
                f"host={shorten(host.decode('latin-1'))}: localhost or an IP address; "
                "a server with an API key takes any name",
                code="host_not_allowed",
            )
            await make_error_response(error, scope["path"])(scope, receive, send)
            return
        await self._app(scope, receive, send)


def is_local_name(host: str) -> bool:
    """Whether a Host header, with or without a port, can only mean an address; true when there is none."""
    if host.startswith("["):
        name = host[1:].partition("]")[0]
    else:
        name = host.partition(":")[0].lower().rstrip(".")
    if name in ("", LOCAL_NAME) or name.endswith(f".{LOCAL_NAME}"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
