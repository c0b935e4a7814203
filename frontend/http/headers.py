"""Headers of a request as the connection has them: names in lower case, each with its value.

Starlette's Headers are a Mapping in Python: 2 us to make them and to ask for one.
"""

from __future__ import annotations

from collections.abc import Iterable


def find_header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes:
    """The value of the first of this name, b"" if there is none."""
    for known, value in headers:
        if known == name:
            return value
    return b""
