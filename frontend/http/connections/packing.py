"""Packed bodies: which codings of Content-Encoding are taken, and what they give, a piece at a time."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from http import HTTPStatus

from ....ipc.errors import shorten
from ..errors import ApiError
from .request_parser import Fields

_TAKEN = "gzip, deflate, identity"
_GZIP = (b"gzip", b"x-gzip")
_PIECE_BYTES = 2**17  # unpacked in 0.2 to 0.6 ms
_FED_BYTES = 2**14
_MAX_MEMBERS = 256  # of gzip; each costs some us however little is in it


def find_coding(headers: Fields) -> bytes:
    """How a body is packed, b"" if it is not. ApiError 415 (RFC 9110 15.5.16) for what is not taken."""
    values = b",".join(value.lower() for name, value in headers if name == b"content-encoding").split(b",")
    coding = b", ".join(value.strip() for value in values if value.strip() not in (b"", b"identity"))
    if coding not in (b"", *_GZIP, b"deflate"):
        shown = shorten(coding.decode("latin-1"))
        raise ApiError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"content-encoding={shown}: expected one of {_TAKEN}",
            code="unsupported_content_encoding",
            headers={"accept-encoding": _TAKEN},
        )
    return coding


def unpack(packed: bytes, coding: bytes) -> Iterator[bytes]:
    """What is in a body, in pieces of bounded size and time, some of them empty. ApiError 400 if it is not
    the coding, whole, and nothing behind it.
    """
    is_gzip = coding in _GZIP
    name = "gzip" if is_gzip else "deflate"
    # deflate is zlib's format, and some clients leave out its head (RFC 9110 8.4.1.2).
    has_head = packed[:1] and packed[0] & 15 == zlib.DEFLATED and int.from_bytes(packed[:2], "big") % 31 == 0
    window_bits = 31 if is_gzip else 15 if has_head else -15
    place = num_members = 0
    while not num_members or (is_gzip and num_members < _MAX_MEMBERS and place < len(packed)):
        inflater, fed, is_fed = zlib.decompressobj(window_bits), b"", False
        while not inflater.eof:
            if not fed:
                fed = packed[place : place + _FED_BYTES]
                place, is_fed = place + len(fed), not fed
            try:
                piece = inflater.decompress(fed, _PIECE_BYTES)
            except zlib.error as error:
                behind = f", and gzip behind its first {num_members}" if num_members else ""
                raise _refuse(f"{name}{behind} ({str(error).rpartition(': ')[2]})") from None
            if is_fed and not piece and not inflater.eof:
                raise _refuse(f"{name} that is whole; this ends too early, at {place} bytes")
            fed = inflater.unconsumed_tail
            yield piece
        place -= len(inflater.unused_data)
        num_members += 1
    if place < len(packed):
        most = f", of at most {_MAX_MEMBERS} members" if is_gzip else ""
        raise _refuse(f"{name}{most}, with nothing behind it; {len(packed) - place} more bytes have come")


def _refuse(expected: str) -> ApiError:
    return ApiError(HTTPStatus.BAD_REQUEST, f"body: expected {expected}", code="invalid_content_encoding")
