"""Which requests travel in one frame: those that a client hands over together, within bounds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from .messages import MAX_REQUESTS_PER_FRAME, AbortRequests, EngineCoreRequest, EngineCoreRequests
from .request_price import find_held_bytes

# Of the requests in a frame beyond the first, by their price; a core decodes so many bytes in some 1 ms.
MAX_SHARED_BYTES = 512 * 1024


def frame_requests(requests: Iterable[EngineCoreRequest]) -> Iterator[EngineCoreRequest | EngineCoreRequests]:
    """The messages that hand these over, in their order; one alone is a message itself."""
    batch: list[EngineCoreRequest] = []
    size_bytes = 0
    for request in requests:
        price = find_held_bytes(request)
        if batch and (len(batch) == MAX_REQUESTS_PER_FRAME or size_bytes + price > MAX_SHARED_BYTES):
            yield _make_message(batch)
            batch, size_bytes = [], 0
        batch.append(request)
        size_bytes += price
    if batch:
        yield _make_message(batch)


def frame_resumed(
    messages: Sequence[EngineCoreRequest | AbortRequests],
) -> list[EngineCoreRequest | EngineCoreRequests | AbortRequests]:
    """What a ledger says to an engine, with its requests, which come first, framed."""
    requests = [message for message in messages if isinstance(message, EngineCoreRequest)]
    aborts = [message for message in messages if isinstance(message, AbortRequests)]
    return [*frame_requests(requests), *aborts]


def _make_message(batch: list[EngineCoreRequest]) -> EngineCoreRequest | EngineCoreRequests:
    return batch[0] if len(batch) == 1 else EngineCoreRequests(batch)
