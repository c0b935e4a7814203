"""Whom a server takes requests for: the names of --allowed-hosts, or without API keys this machine's.

A web page can make its own name lead to 127.0.0.1 (DNS rebinding), and the browser then lets it read what
this server answers. The Host header still has the page's name, so that is what is checked.
"""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Iterable
from http import HTTPStatus

from starlette.types import ASGIApp, Receive, Scope, Send

from ....ipc.errors import shorten
from ..errors import ApiError, make_error_response
from ..headers import find_header
from .listen import LOCAL_NAME

_KNOWN_HOSTS = 8  # Host headers, of at most max_header_bytes, that are remembered


class AllowedHosts:
    """Names that requests may be for. Asked when a request's headers are complete, before its body comes."""

    def __init__(self, names: Iterable[str]) -> None:
        """A name that begins with '*.' stands for all below it, '*' for any."""
        self._names = frozenset(name.lower() for name in names)

    def check(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """ApiError 403 for a request to another host, or to none."""
        if "*" in self._names:
            return
        host = _read_host(headers)
        name = _name_of(host)
        wider = [f"*{name[place:]}" for place, letter in enumerate(name) if letter == "."]
        if self._names.isdisjoint((name, *wider)):
            raise _refuse(host, "a name that this server answers to (--allowed-hosts)")


class LocalHostMiddleware:
    """Answers 403 to requests for a host that is neither localhost nor an IP address."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = _read_host(scope.get("headers", ()))
        if scope["type"] == "http" and not is_local_name(host):
            allowed = "localhost or an IP address; a server with an API key takes any name"
            await make_error_response(_refuse(host, allowed), scope["path"])(scope, receive, send)
            return
        await self._app(scope, receive, send)


@functools.lru_cache(_KNOWN_HOSTS)
def is_local_name(host: str) -> bool:
    """Whether a Host header, with or without a port, can only mean an address; true when there is none."""
    name = _name_of(host)
    if name in ("", LOCAL_NAME) or name.endswith(f".{LOCAL_NAME}"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _read_host(headers: Iterable[tuple[bytes, bytes]]) -> str:
    return find_header(headers, b"host").decode("latin-1")


def _name_of(host: str) -> str:
    """Without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower().rstrip(".")


def _refuse(host: str, allowed: str) -> ApiError:
    return ApiError(HTTPStatus.FORBIDDEN, f"host={shorten(host)}: {allowed}", code="host_not_allowed")
