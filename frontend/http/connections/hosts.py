"""Whom a server takes requests for: the names of --allowed-hosts, or without API keys this machine's.

A web page can make its own name lead to 127.0.0.1 (DNS rebinding), and the browser then lets it read what
this server answers. The Host header still has the page's name, so that is what is checked.
"""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Iterable
from http import HTTPStatus

from ....ipc.errors import shorten
from ..errors import ApiError
from ..headers import find_header
from ..options import ServerOptions
from .listen import LOCAL_NAME, is_loopback

_KNOWN_HOSTS = 8  # Host headers, of at most max_header_bytes, that are remembered


class AllowedHosts:
    """Whom requests may be for. Asked when a request's headers are complete, before its body comes."""

    def __init__(self, names: Iterable[str]) -> None:
        """A name that begins with '*.' stands for all below it, '*' for any. None: this machine's."""
        self._names = frozenset(name.lower() for name in names)

    def check(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """ApiError 403 for a request to another host."""
        host = find_header(headers, b"host").decode("latin-1")
        if not self._names:
            is_allowed = is_local_name(host)
            allowed = "localhost or an IP address; a server with an API key takes any name"
        else:
            name = _name_of(host)
            wider = [f"*{name[place:]}" for place, letter in enumerate(name) if letter == "."]
            is_allowed = not self._names.isdisjoint((name, *wider, "*"))
            allowed = "a name that this server answers to (--allowed-hosts)"
        if not is_allowed:
            raise ApiError(
                HTTPStatus.FORBIDDEN, f"host={shorten(host)}: expected {allowed}", code="host_not_allowed"
            )


def find_allowed_hosts(options: ServerOptions) -> AllowedHosts | None:
    """None for a server that any name may lead to: one with keys, or on no address of this machine's own."""
    is_for_browsers_here = options.uds is None and is_loopback(options.host)
    if options.allowed_hosts or (is_for_browsers_here and not options.api_key_hashes):
        return AllowedHosts(options.allowed_hosts)
    return None


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


def _name_of(host: str) -> str:
    """Without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower().rstrip(".")
