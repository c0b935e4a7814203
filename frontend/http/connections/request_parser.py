"""RequestParser: the bytes of a connection -> requests, as RFC 9112 writes them and no otherwise. Pure.

Whoever stands before this server may read otherwise what is not plainly HTTP/1.1 (request smuggling): it is
refused. A part is kept until it is whole, and has a bound meanwhile. Methods raise ApiErrors (400, 405, 413,
414, 431), behind which the connection says nothing that could be read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto
from http import HTTPStatus

from ....ipc.errors import shorten
from ..errors import ApiError
from ..limits import Limits

_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_LINE = re.compile(rb"([A-Z-]+) ([!-\"$-~]+) HTTP/([0-9]\.[0-9])\r\n")
_FIELDS = re.compile(rb"(?:" + _TOKEN + rb":[\t -~\x80-\xff]*\r\n)*")
_FIELD = re.compile(rb"(" + _TOKEN + rb"):[\t ]*([^\r\n]*)\r\n")
_NEVER = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|(?<!\r)\n|\r(?!\n|\Z)")  # in a head
_BLANK_LINES = re.compile(rb"(?:\r\n)+")
_HANDSHAKE = b"\x16\x03"  # how TLS begins
_CHUNK_LINE = re.compile(rb"\r\n([0-9A-Fa-f]{1,16})(?:;[\t -~\x80-\xff]*)?\r\n")  # behind another chunk
_MAX_CHUNK_LINE_BYTES = 4096
_LENGTH = re.compile(rb"0*([0-9]{1,19})")
# RFC 3986's host and port: a name may be empty, an address of IPv6 has brackets.
_HOST = re.compile(
    rb"(?:\[[0-9A-Za-z:.%~_-]+\]|(?:[0-9A-Za-z._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*)(?::[0-9]{0,5})?"
)
_ABSOLUTE = re.compile(rb"(?i:https?)://([^/?]+)(.*)")
_VERSIONS = ("1.0", "1.1")
_FRAMING = (b"content-length", b"transfer-encoding")

Fields = list[tuple[bytes, bytes]]  # names in lower case


@dataclass(slots=True)
class RequestHead:
    """A request without its body. target: path and query. body_bytes: None for a body in chunks."""

    method: str
    target: bytes
    http_version: str
    headers: Fields
    num_bytes: int
    body_bytes: int | None

    @property
    def keeps_alive(self) -> bool:
        """Whether the client may send another request behind it."""
        return self.http_version != "1.0" and not self._has_option(b"connection", b"close")

    @property
    def expects_continue(self) -> bool:
        """Whether the client waits for a word before it sends the body; one of 1.0 would misread it."""
        return self.http_version != "1.0" and self._has_option(b"expect", b"100-continue")

    def _has_option(self, header: bytes, option: bytes) -> bool:
        values = [value for name, value in self.headers if name == header]
        return any(option == part.strip().lower() for value in values for part in value.split(b","))


class _Part(Enum):
    """What comes next."""

    HEAD = auto()
    BODY = auto()  # of a known length
    CHUNKS = auto()
    TRAILERS = auto()


class RequestParser:
    """Of one connection. `feed` it what comes, then take a head, then its body until that is whole.

    What stands behind a request is kept as it is until the next head is asked for: whose bound that is, is
    the caller's to say. method, target: of the last line that could be read, for logs.
    """

    def __init__(self, limits: Limits) -> None:
        self.method, self.target = "-", b""
        self._limits = limits
        self._data = bytearray()
        self._part = _Part.HEAD
        self._num_searched = 0  # bytes of a head, or of trailers, that have been looked through
        self._has_line = False  # of the head; `_line`: None if it is none
        self._line: re.Match[bytes] | None = None
        self._num_blank_bytes = 0  # before it
        self._num_left = 0  # of a body, or of a chunk
        self._num_body_bytes = 0  # as they came, with chunk lines

    @property
    def num_kept_bytes(self) -> int:
        """Bytes that have been fed and not taken."""
        return len(self._data)

    def feed(self, data: bytes) -> None:
        """Bytes have come."""
        self._data += data

    def drop(self) -> None:
        """Nothing of what has been fed is going to be read."""
        self._data, self.method, self.target = bytearray(), "-", b""
        self._line, self._has_line, self._num_searched = None, False, 0

    def take_head(self) -> RequestHead | None:
        """The head of the next request, None as long as it is not whole."""
        data, limits = self._data, self._limits
        if not data:
            return None
        if blank := _BLANK_LINES.match(data):
            self._num_blank_bytes += blank.end()
            del data[: blank.end()]
            self._num_searched = 0
        if data.startswith(_HANDSHAKE):
            raise _refuse_value("request: expected plain HTTP, as http://; this came encrypted, as https://")
        if not self._has_line:
            self._note_line()
        end = data.find(b"\r\n\r\n", max(0, self._num_searched - 3))
        num_bytes = self._num_blank_bytes + (len(data) if end < 0 else end + 4)
        if num_bytes > limits.max_header_bytes:
            raise _too_large_head(num_bytes, limits, has_line=self._has_line or not data)
        if end < 0:
            if _NEVER.search(data, max(0, self._num_searched - 1)):
                raise _refuse("a line or header ends otherwise, or has a control character")
            self._num_searched = len(data)
            return None
        head = bytes(data[: end + 2])
        del data[: end + 4]
        line, self._line, self._has_line = self._line, None, False
        self._num_searched = self._num_blank_bytes = 0
        return self._begin(head, line, num_bytes)

    def take_body(self) -> tuple[bytes | bytearray, bool]:
        """What has come of the body since it was asked for last; whether it is whole now."""
        piece: bytes | bytearray = b""
        if self._part is _Part.BODY:
            piece = self._data
            if len(piece) <= self._num_left:
                self._data = bytearray()
            else:
                piece = piece[: self._num_left]
                del self._data[: self._num_left]
            self._num_left -= len(piece)
            if not self._num_left:
                self._part = _Part.HEAD
        elif self._part is _Part.CHUNKS:
            piece = self._take_chunks()
        if self._part is _Part.TRAILERS:
            self._take_trailers()
        return piece, self._part is _Part.HEAD

    def _note_line(self) -> None:
        """Read the first line once it is whole."""
        if not self._num_searched:
            self.method, self.target = "-", b""
        end = self._data.find(b"\r\n", max(0, self._num_searched - 1))
        if 0 <= end <= self._limits.max_header_bytes:
            self._has_line, self._line = True, _LINE.match(bytes(self._data[: end + 2]))
            if self._line is not None:
                self.method, self.target = self._line[1].decode(), self._line[2]

    def _begin(self, head: bytes, line: re.Match[bytes] | None, num_bytes: int) -> RequestHead:
        if line is None or not _FIELDS.fullmatch(head, line.end()):
            raise _refuse("METHOD TARGET HTTP/1.1, then NAME: VALUE")
        if self.method == "CONNECT":
            text = "method=CONNECT: expected DELETE, GET, HEAD or POST, as this server is no proxy"
            allow = {"allow": "DELETE, GET, HEAD, POST"}
            raise ApiError(HTTPStatus.METHOD_NOT_ALLOWED, text, code="method_not_allowed", headers=allow)
        version = line[3].decode()
        if version not in _VERSIONS:
            raise _refuse_value(f"version={version}: expected {' or '.join(_VERSIONS)}")
        headers = [(name.lower(), value.rstrip(b" \t")) for name, value in _FIELD.findall(head, line.end())]
        if len(headers) > self._limits.max_headers:
            text = f"headers: expected at most {self._limits.max_headers} (max_headers)"
            raise ApiError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, text, code="too_many_headers")
        self.target = find_target(self.target, headers, version)
        body_bytes = find_body_length(headers, version)
        self._num_left = body_bytes or 0
        if body_bytes is None:
            self._part, self._num_body_bytes = _Part.CHUNKS, 0
            self._data[:0] = b"\r\n"  # the first chunk's line comes as those behind others
        elif body_bytes:
            self._part = _Part.BODY
        return RequestHead(self.method, self.target, version, headers, num_bytes, body_bytes)

    def _take_chunks(self) -> bytes:
        data, place, num_left = bytes(self._data), 0, self._num_left
        pieces: list[bytes] = []
        while True:  # 0.9 us a chunk, and all may be of one byte
            end = place + num_left
            pieces.append(data[place:end])
            if end > len(data):
                place, num_left = len(data), end - len(data)
                break
            line = _CHUNK_LINE.match(data, end)
            if line is None:
                place, num_left = end, 0
                self._check_chunk_line(data[place:])
                break
            place, num_left = line.end(), int(line[1], 16)
            if not num_left:
                self._part = _Part.TRAILERS
                break
        self._num_left = num_left
        del self._data[:place]
        self._num_body_bytes += place
        check_body_length(self._num_body_bytes, self._limits)
        return b"".join(pieces)

    def _check_chunk_line(self, line: bytes) -> None:
        """Refuse what is not going to be one."""
        if len(line) > _MAX_CHUNK_LINE_BYTES:
            text = f"body: {len(line)} bytes of a chunk's line: expected at most {_MAX_CHUNK_LINE_BYTES}"
            raise ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text, code="body_too_large")
        if not b"\r\n".startswith(line[:2]) or b"\n" in line[2:]:
            raise _refuse("a chunk has its size in hexadecimal digits, and so many bytes")

    def _take_trailers(self) -> None:
        """Drop them: they could be anything that is checked in headers, and come after the check."""
        data = self._data
        end = 0 if data.startswith(b"\r\n") else data.find(b"\r\n\r\n", max(0, self._num_searched - 3)) + 2
        is_whole = end != 1
        self._num_searched = 0 if is_whole else len(data)
        num_bytes = end + 2 if is_whole else len(data)
        if num_bytes > self._limits.max_header_bytes:
            raise _too_large_head(num_bytes, self._limits)
        if not is_whole:
            return
        names = {name.lower() for name, _ in _FIELD.findall(data, 0, end)}
        if not _FIELDS.fullmatch(data, 0, end) or not names.isdisjoint(_FRAMING):
            raise _refuse("behind the last chunk NAME: VALUE, and nothing of the body's length")
        del data[: end + 2]
        self._part = _Part.HEAD


def check_body_length(num_bytes: int, limits: Limits) -> None:
    """ApiError 413 for a body, come or announced, that is too long."""
    if num_bytes > limits.max_body_bytes:
        text = f"body={num_bytes} bytes: expected at most {limits.max_body_bytes} (max_body_bytes)"
        raise ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text, code="body_too_large")


def find_target(target: bytes, headers: Fields, http_version: str) -> bytes:
    """The target's path and query. A request says once whom it is for.

    A target with a host goes before the Host header and becomes it (RFC 9112 3.2.2).
    """
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) != 1 and (hosts or http_version != "1.0"):
        raise _refuse_value(f"host: expected one Host header, not {len(hosts)}")
    if hosts and not _HOST.fullmatch(hosts[0]):
        raise _refuse_value(f"host={_show(hosts[0])}: expected a name or an address, and a port")
    if target.startswith(b"/"):
        return target
    absolute = _ABSOLUTE.fullmatch(target)
    if absolute is None or not _HOST.fullmatch(absolute[1]):
        raise _refuse_value(f"target={_show(target)}: expected a path, or http://HOST/PATH")
    headers[:] = [field for field in headers if field[0] != b"host"] + [(b"host", absolute[1])]
    return absolute[2] if absolute[2].startswith(b"/") else b"/" + absolute[2]


def find_body_length(headers: Fields, http_version: str) -> int | None:
    """Bytes of the body as the head says it, once; None when they come in chunks."""
    framing = [field for field in headers if field[0] in _FRAMING]
    if not framing:
        return 0
    name, value = framing[0]
    if name == b"transfer-encoding" and (value.lower() != b"chunked" or http_version == "1.0"):
        codings = b", ".join(value for _, value in framing)
        raise _refuse_value(f"transfer-encoding={_show(codings)}: expected chunked, once, in HTTP/1.1")
    length = _LENGTH.fullmatch(value)
    if len(framing) > 1 or (name == b"content-length" and length is None):
        framed = ", ".join(f"{name.decode()}={_show(value)}" for name, value in framing)
        raise _refuse_value(f"{framed}: expected one content-length, or transfer-encoding in its place")
    return int(length[1]) if length else None


def _too_large_head(num_bytes: int, limits: Limits, has_line: bool = True) -> ApiError:
    if not has_line:
        text = f"target={num_bytes} bytes: expected at most {limits.max_header_bytes} (max_header_bytes)"
        return ApiError(HTTPStatus.REQUEST_URI_TOO_LONG, text, code="uri_too_long")
    text = f"headers={num_bytes} bytes: expected at most {limits.max_header_bytes} (max_header_bytes)"
    return ApiError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, text, code="headers_too_large")


def _refuse(allowed: str) -> ApiError:
    return _refuse_value(f"request: expected valid HTTP/1.1 ({allowed})")


def _refuse_value(text: str) -> ApiError:
    return ApiError(HTTPStatus.BAD_REQUEST, text, code="invalid_http")


def _show(value: bytes) -> str:
    return shorten(value.decode("latin-1"))
