"""MessageMeter, told what a parser finds in slices: what counts as head, as body, and as neither."""

from __future__ import annotations

import pytest
from quire.frontend.http.connections.message_meter import MessageMeter
from quire.frontend.http.errors import ApiError
from quire.frontend.http.limits import Limits


def start(num_header_bytes: int = 100, num_body_bytes: int = 50) -> MessageMeter:
    """In a chunked body, with bounds on both parts."""
    limits = Limits(max_header_bytes=num_header_bytes, max_body_bytes=num_body_bytes, max_headers=3)
    meter = MessageMeter(limits)
    meter.begin_slice()
    meter.begin()
    meter.count_field(b"a", b"b", 0)
    meter.end_head()
    meter.end_slice(60)
    return meter


def feed(meter: MessageMeter, num_bytes: int, num_body_bytes: int = 0, has_chunk_line: bool = False) -> None:
    """A slice within the body, with or without a chunk's line in it."""
    meter.begin_slice()
    if has_chunk_line:
        meter.note_chunk_line()
    if num_body_bytes:
        meter.count_body(num_body_bytes)
    meter.end_slice(num_bytes)


def test_a_body_counts_with_what_lies_between_its_chunks() -> None:
    meter = start()
    feed(meter, 30, num_body_bytes=25, has_chunk_line=True)
    feed(meter, 15)
    with pytest.raises(ApiError, match=r"^body=51 bytes: at most 50 \(max_body_bytes\)") as caught:
        feed(meter, 6, num_body_bytes=1)
    assert (caught.value.status, caught.value.code) == (413, "body_too_large")


def test_what_follows_a_chunks_line_without_a_byte_of_it_is_trailers() -> None:
    meter = start()
    feed(meter, 5, has_chunk_line=True)
    feed(meter, 90)
    assert meter.num_unfinished_bytes == 90
    with pytest.raises(ApiError, match=r"^headers=110 bytes: at most 100 \(max_header_bytes\)") as caught:
        feed(meter, 20)
    assert caught.value.status == 431


def test_a_head_without_an_end_is_counted_as_it_comes() -> None:
    meter = start()
    meter.begin_slice()
    meter.end()
    meter.begin()
    meter.end_slice(70)  # at most a slice of the message before counts as this one's
    assert (meter.has_begun, meter.is_in_head, meter.num_unfinished_bytes) == (True, True, 70)
    with pytest.raises(ApiError, match=r"^headers=101 bytes"):
        feed(meter, 31)


def test_fields_are_counted_by_number_and_size_and_anew_for_each_message() -> None:
    meter = start()
    assert meter.num_header_bytes == 6
    with pytest.raises(ApiError, match=r"^headers: at most 3 \(max_headers\)"):
        meter.count_field(b"a", b"b", 3)
    meter.end()
    meter.begin()
    assert meter.num_header_bytes == 0
    meter.count_url(50)
    with pytest.raises(ApiError, match=r"^headers=105 bytes"):
        meter.count_field(b"n" * 25, b"v" * 26, 0)
