"""Messages <-> frames: a type byte and a msgpack body. Knows no socket and no meaning of a message.

Both are one frame, not two: a DEALER with ZMQ_IMMEDIATE whose connection ends between the frames of a message
that it reads aborts its process (libzmq 4.3.5, fq.cpp: `!_more`; after some 10 kills of a busy peer).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from ..decoding import Encoded, make_msgpack_decoder
from ..errors import ProtocolError
from .messages import MESSAGE_TYPES, EngineCoreRequest, RequestId, UtilityCall, UtilityMethod
from .step import STEP_MESSAGE_TYPES

# A body above this is refused before it is decoded. What clients send a core has a lower limit
# (`request_price.find_max_frame_bytes`); this one is of outputs, and of steps with many new requests.
MAX_BODY_BYTES = 128 * 1024 * 1024


class Codec:
    """Encodes and decodes one closed set of message types. Not thread safe; cheap to make."""

    def __init__(
        self, struct_of: Mapping[bytes, type[msgspec.Struct]], max_body_bytes: int = MAX_BODY_BYTES
    ) -> None:
        self._max_body_bytes = max_body_bytes
        self._encoder = msgspec.msgpack.Encoder()
        self._struct_of = struct_of
        # Made when the first message of a type comes: together they take a tenth of a frontend's start.
        self._decoders: dict[bytes, Callable[[Encoded], Any]] = {}
        self._kind_of = {cls: kind for kind, cls in struct_of.items()}

    def encode(self, message: msgspec.Struct) -> tuple[bytes]:
        """A message's one frame. Raises KeyError for a type that is not in the set (our own bug)."""
        return (self._kind_of[type(message)] + self._encoder.encode(message),)

    def decode(self, frames: Sequence[bytes]) -> Any:
        """The message in `frames`. Raises ProtocolError that says what is wrong, never anything else."""
        if len(frames) != 1:
            raise ProtocolError(f"a message has 1 frame, not {len(frames)}")
        kind, body = frames[0][:1], memoryview(frames[0])[1:]
        decode = self._decoders.get(kind) or self._make_decoder(kind)
        if len(body) > self._max_body_bytes:
            raise ProtocolError(f"a body of {len(body)} bytes is over the limit of {self._max_body_bytes}")
        try:
            return decode(body)
        except (msgspec.MsgspecError, RecursionError, ValueError, TypeError, OverflowError) as error:
            raise ProtocolError(f"message type {kind!r} does not decode: {error}") from None

    def _make_decoder(self, kind: bytes) -> Callable[[Encoded], Any]:
        struct = self._struct_of.get(kind)
        if struct is None:
            raise ProtocolError(f"unknown message type {kind!r}")
        decode = self._decoders[kind] = make_msgpack_decoder(struct)
        return decode


def make_client_codec(max_body_bytes: int = MAX_BODY_BYTES) -> Codec:
    """The protocol of messages.py, both directions."""
    return Codec(MESSAGE_TYPES, max_body_bytes)


class _RequestName(msgspec.Struct, array_like=True):
    request_id: RequestId  # the first field of an EngineCoreRequest


_decode_name = make_msgpack_decoder(_RequestName)


def find_request_id(frames: Sequence[bytes]) -> str | None:
    """The id of the request in a message that does not decode, None if it cannot be told."""
    if len(frames) != 1 or MESSAGE_TYPES.get(frames[0][:1]) is not EngineCoreRequest:
        return None
    try:
        return _decode_name(memoryview(frames[0])[1:]).request_id
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return None


def make_step_codec() -> Codec:
    """The protocol of step.py, both directions."""
    return Codec(STEP_MESSAGE_TYPES)


# Asks a silent engine core whether it is there. Its answer is nobody's call: clients count theirs from 1.
PING = make_client_codec().encode(UtilityCall(0, UtilityMethod.PING))
