"""What a JSON text costs to decode, told before it is: msgspec holds the interpreter while it decodes.

Megabytes of text or token ids take milliseconds; as many numbers that are hard to round, or little lists,
take seconds. Only what stands outside of strings counts: in a text every sign is as cheap as any other.
"""

from __future__ import annotations

from http import HTTPStatus

from ..errors import ApiError
from ..limits import (
    MAX_JSON_CONTAINERS,
    MAX_JSON_FLOATS,
    MAX_JSON_LONG_NUMBERS,
    MAX_JSON_STRINGS,
    MAX_JSON_VALUES,
)

MAX_CHEAP_BYTES = 2**16  # nothing of that size takes long
_LONG_NUMBERS = 100  # 40 us at 700 digits
_LONG_NUMBER = b"0" * 24
_DIGITS_TO_0 = bytes.maketrans(b"123456789", b"000000000")


def check_json_cost(body: bytes) -> None:
    """Raise ApiError 400 for a text that would take longer than some 50 ms to decode."""
    if len(body) <= MAX_CHEAP_BYTES:
        return
    _check("strings", _count_strings(body), MAX_JSON_STRINGS)
    rest = _cut_strings(body)
    _check("values", rest.count(b","), MAX_JSON_VALUES)
    _check("lists and objects", rest.count(b"[") + rest.count(b"{"), MAX_JSON_CONTAINERS)
    num_floats = max(rest.count(b"."), rest.count(b"e") + rest.count(b"E"))
    _check("floats", num_floats, MAX_JSON_FLOATS)
    num_long = rest.translate(_DIGITS_TO_0).count(_LONG_NUMBER)
    _check(f"times {len(_LONG_NUMBER)} digits in a row", num_long, MAX_JSON_LONG_NUMBERS)


def _count_strings(body: bytes) -> int:
    """At least as many as there are; escaped quotes are few, or dear themselves."""
    return (body.count(b'"') - body.count(b'\\"')) // 2


def _cut_strings(body: bytes) -> bytes:
    """What stands between strings."""
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    return b"".join(body.split(b'"')[::2])


def _check(what: str, count: int, allowed: int) -> None:
    if count > allowed:
        text = f"body={count} {what}: at most {allowed} in JSON of more than {MAX_CHEAP_BYTES} bytes"
        raise ApiError(HTTPStatus.BAD_REQUEST, text, code="json_too_complex")
