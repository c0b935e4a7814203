"""What the head of a request has to be where httptools takes more than HTTP/1.1 has. Knows no connection.

Whoever stands before this server may read such a head otherwise (request smuggling): it is refused. Each
function raises ApiError.
"""

from __future__ import annotations

import re
from http import HTTPStatus

from ....ipc.errors import shorten
from ..errors import ApiError

# RFC 3986's host and port: a name may be empty, an address of IPv6 has brackets.
_HOST = re.compile(
    rb"(?:\[[0-9A-Za-z:.%~_-]+\]|(?:[0-9A-Za-z._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*)(?::[0-9]{0,5})?"
)
_ABSOLUTE = re.compile(rb"(?i:https?)://([^/?#]+)(.*)", re.DOTALL)
_VERSIONS = ("1.0", "1.1")

Fields = list[tuple[bytes, bytes]]  # names in lower case


def check_method(method: bytes) -> None:
    """405 for CONNECT."""
    if method == b"CONNECT":
        text = "method=CONNECT: this server is no proxy"
        raise ApiError(HTTPStatus.METHOD_NOT_ALLOWED, text, code="method_not_allowed")


def check_head(target: bytes, headers: Fields, http_version: str) -> bytes:
    """The target's path and query. 400 for what is no HTTP/1.1, or leaves open whom it is for, or its end.

    A target with a host goes before the Host header and becomes it (RFC 9112 3.2.2).
    """
    if http_version not in _VERSIONS:
        raise _refuse(f"version={http_version}: {' or '.join(_VERSIONS)}")
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) != 1 and (hosts or http_version != "1.0"):
        raise _refuse(f"host: one Host header, not {len(hosts)}")
    if hosts and not _HOST.fullmatch(hosts[0]):
        raise _refuse(f"host={_show(hosts[0])}: a name or an address, and a port")
    codings = [value for name, value in headers if name == b"transfer-encoding"]
    if codings and (http_version == "1.0" or [value.lower() for value in codings] != [b"chunked"]):
        raise _refuse(f"transfer-encoding={_show(b', '.join(codings))}: chunked, once, in HTTP/1.1")
    if target.startswith(b"/"):
        return target
    match = _ABSOLUTE.fullmatch(target)
    if match is None or not _HOST.fullmatch(match[1]):
        raise _refuse(f"target={_show(target)}: a path, or http://HOST/PATH")
    headers[:] = [field for field in headers if field[0] != b"host"] + [(b"host", match[1])]
    return match[2] if match[2].startswith(b"/") else b"/" + match[2]


def read_body_length(headers: Fields) -> int | None:
    """Bytes of the body as the head says, None when they come in chunks. httptools has checked the digits."""
    num_bytes = 0
    for name, value in headers:
        if name == b"transfer-encoding":
            return None
        if name == b"content-length":
            num_bytes = int(value.lstrip(b"0") or b"0")  # of many digits, which int refuses, most are zeros
    return num_bytes


def remove_root(url: bytes, root_path: bytes) -> bytes:
    """A path without what a proxy has put before it; one that it has already taken away stays as it is."""
    rest = url.removeprefix(root_path)
    if rest is url or rest[:1] not in (b"", b"/", b"?"):
        return url
    return rest if rest.startswith(b"/") else b"/" + rest


def _refuse(text: str) -> ApiError:
    return ApiError(HTTPStatus.BAD_REQUEST, text, code="invalid_http")


def _show(value: bytes) -> str:
    return shorten(value.decode("latin-1"))
