"""Token ids on the wire: little-endian int32 bytes.

A prompt of 4,096 ids decodes in 0.5 us as bytes and in 63 us as a msgpack list, and a slice of the bytes
is what the prefix cache hashes.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

TOKEN_SIZE_BYTES = 4

if sys.byteorder != "little":  # pragma: no cover
    raise ImportError("quire's wire format is little-endian; this machine is not")


def encode_token_ids(token_ids: Iterable[int]) -> bytes:
    """Pack ids; raises OverflowError or TypeError for what is not an int32."""
    return array("i", token_ids).tobytes()


def decode_token_ids(packed: bytes) -> list[int]:
    """Unpack what `encode_token_ids` packed; raises ValueError when the length is not a multiple of 4."""
    return array("i", packed).tolist()


def count_token_ids(packed: bytes) -> int:
    """How many ids `packed` holds."""
    return len(packed) // TOKEN_SIZE_BYTES
