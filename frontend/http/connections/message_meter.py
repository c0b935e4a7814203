"""MessageMeter: how much of a message has come, part by part, with a bound for each. Knows no sockets."""

from __future__ import annotations

from http import HTTPStatus

from ..errors import ApiError
from ..limits import Limits

_FIELD_OVERHEAD = 4  # ": " and the end of the line


class MessageMeter:
    """Counts what one connection sends: told by the parser what it has found in each slice of bytes.

    A message is a head and a body; what is neither a body's byte nor a part of the head is trailers, which
    count as head, or lies between chunks, which counts as body. Raises ApiErrors (431, 413) past the limits.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.has_begun = False  # a message, of which not everything has come
        self.is_in_head = True  # or between two messages
        self.num_header_bytes = 0  # of fields that are complete
        self.num_unfinished_bytes = 0  # of the head, complete or not, and of trailers
        self._num_parts = 0  # heads and bodies that have begun or ended, so that a slice knows of a border
        self._is_after_chunk_line = False  # and none of the chunk's bytes has come: it may be a trailer
        self._num_body_bytes = 0
        self._num_framing_bytes = 0  # between its chunks
        self._at_slice = (0, 0, False)

    def begin(self) -> None:
        """A message begins."""
        self._num_parts += 1
        self.has_begun = True
        self._is_after_chunk_line = False
        self.num_header_bytes = self._num_body_bytes = self._num_framing_bytes = 0

    def count_url(self, num_bytes: int) -> None:
        """A piece of the request's line."""
        self.num_header_bytes += num_bytes
        self._check_head(self.num_header_bytes)

    def count_field(self, name: bytes, value: bytes, num_fields: int) -> None:
        """A header, behind `num_fields` of them."""
        self.num_header_bytes += len(name) + len(value) + _FIELD_OVERHEAD
        self._check_head(self.num_header_bytes)
        if num_fields >= self._limits.max_headers:
            text = f"headers: at most {self._limits.max_headers} (max_headers)"
            raise ApiError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, text, code="too_many_headers")

    def end_head(self) -> None:
        """What follows is the body."""
        self._num_parts += 1
        self.is_in_head = False
        self.num_unfinished_bytes = 0

    def note_chunk_line(self) -> None:
        """The line with a chunk's size is complete."""
        self._is_after_chunk_line = True

    def count_body(self, num_bytes: int) -> None:
        """A piece of the body."""
        self._is_after_chunk_line = False
        self._num_body_bytes += num_bytes

    def end(self) -> None:
        """The message is complete."""
        self._check_body()
        self._num_parts += 1
        self.is_in_head = True
        self.has_begun = False

    def drop(self) -> None:
        """Nothing more is read of what has begun."""
        self.has_begun, self.is_in_head, self.num_unfinished_bytes = False, True, 0

    def begin_slice(self) -> None:
        """The parser is about to be given bytes."""
        self._at_slice = self._num_parts, self._num_body_bytes, self._is_after_chunk_line

    def end_slice(self, num_bytes: int) -> None:
        """It has been given so many, and has said what it found in them."""
        num_parts, num_body_bytes, was_after_chunk_line = self._at_slice
        if num_parts != self._num_parts:  # a border is somewhere in it
            self.num_unfinished_bytes = num_bytes if self.has_begun and self.is_in_head else 0
            return
        num_other_bytes = num_bytes - (self._num_body_bytes - num_body_bytes)
        if self.is_in_head or (was_after_chunk_line and self._is_after_chunk_line):
            self.num_unfinished_bytes += num_other_bytes
            self._check_head(self.num_unfinished_bytes)
        else:
            self._num_framing_bytes += num_other_bytes
            self._check_body()

    def check_body_length(self, num_bytes: int) -> None:
        """Of a body that is to come, or has."""
        if num_bytes > self._limits.max_body_bytes:
            text = f"body={num_bytes} bytes: at most {self._limits.max_body_bytes} (max_body_bytes)"
            raise ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text, code="body_too_large")

    def _check_head(self, num_bytes: int) -> None:
        if num_bytes > self._limits.max_header_bytes:
            text = f"headers={num_bytes} bytes: at most {self._limits.max_header_bytes} (max_header_bytes)"
            raise ApiError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, text, code="headers_too_large")

    def _check_body(self) -> None:
        self.check_body_length(self._num_body_bytes + self._num_framing_bytes)
