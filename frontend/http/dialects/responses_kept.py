"""GET, DELETE and cancel of /v1/responses/{id}: what is kept of a key's responses, in whichever process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Literal, NamedTuple, Self

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ....ipc.decoding import make_json_decoder
from ..bodies.openapi import Routes
from ..caller import Caller
from ..engines.served_models import ServedModels
from ..errors import ApiError, ErrorResponse, FieldError
from ..jobs.peers import ResponseQuery, ResponseReply
from ..stream import EventStream, respond
from . import responses_body as body
from .responses_background import encode_stream_failure

_PATH = "/v1/responses/{response_id}"
_LIMIT, _MAX_LIMIT = 20, 100  # items of a page: OpenAI's
_decode_items = make_json_decoder(list[body.InputItem])


def add_routes(routes: Routes, models: ServedModels, find_caller: Callable[[Request], Caller]) -> None:
    """The routes of responses that are there. They answer while the server drains: what runs is taken up."""
    responses = models.parts.responses

    async def ask(
        what: Literal["find", "remove", "cancel"], response_id: str, http: Request
    ) -> ResponseReply:
        return await responses.ask(ResponseQuery(what, response_id, find_caller(http).owner))

    async def get_response(response_id: str, http: Request) -> Response:
        """A response that is kept, or runs; with `stream=true` its events, behind number `starting_after`."""
        after = _read_start(http.query_params)
        if after is None:
            return _send((await ask("find", response_id, http)).response)
        events = await responses.follow(response_id, find_caller(http).owner, after)
        return EventStream(events, models.parts.options.limits, encode_stream_failure, response_id)

    async def delete_response(response_id: str, http: Request) -> Response:
        """Forget a response."""
        if (await ask("remove", response_id, http)).status == "running":
            raise _refuse(response_id, "it is in progress: cancel it")
        return respond({"id": response_id, "object": "response", "deleted": True})

    async def cancel_response(response_id: str, http: Request) -> Response:
        """End a response that runs: its own answer ends as well, with what it has."""
        kept = await ask("cancel", response_id, http)
        if kept.status == "ended" and _decode_status(kept.response).status != "cancelled":
            raise _refuse(response_id, "it has ended")
        return _send(kept.response)

    async def list_input_items(response_id: str, http: Request) -> Response:
        """The conversation that a response answers."""
        page = _Page.read(http.query_params)
        kept = await ask("find", response_id, http)
        if kept.status == "running":
            raise _refuse(response_id, "it is in progress")
        # A conversation may be as large as all that is kept.
        return _send(await asyncio.to_thread(_encode_items, kept.items[:-1], page))

    more = {400: ErrorResponse, 404: ErrorResponse}
    routes.add(_PATH, get_response, None, streams=True, more=more)
    routes.add(_PATH, delete_response, None, more=more, method="DELETE")
    routes.add(f"{_PATH}/cancel", cancel_response, None, more=more, method="POST")
    routes.add(f"{_PATH}/input_items", list_input_items, None, more=more)


class _Status(msgspec.Struct):
    """Of a response, what it has come to."""

    status: str


_decode_status = make_json_decoder(_Status)


def _read_start(query: Mapping[str, str]) -> int | None:
    """The number behind which events are asked for, -1 for all of them; None: none are. Raises FieldError."""
    stream, after = query.get("stream", "false").lower(), query.get("starting_after")
    if stream not in ("true", "false"):
        raise FieldError("stream", query["stream"], "true or false")
    if stream == "false":
        if after is not None:
            raise FieldError("starting_after", after, "only with stream=true")
        return None
    if after is not None and not (after.isascii() and after.isdigit() and len(after) < 10):
        raise FieldError("starting_after", after, "the sequence_number of an event")
    return -1 if after is None else int(after)


class _Page(NamedTuple):
    """Which items of a list are asked for."""

    limit: int
    after: str | None
    is_reversed: bool

    @classmethod
    def read(cls, query: Mapping[str, str]) -> Self:
        """OpenAI's parameters. Raises FieldError."""
        limit, order = query.get("limit", str(_LIMIT)), query.get("order", "desc")
        if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit[:9]) <= _MAX_LIMIT:
            raise FieldError("limit", limit, f"an integer from 1 to {_MAX_LIMIT}")
        if order not in ("asc", "desc"):
            raise FieldError("order", order, "'asc' or 'desc'")
        return cls(int(limit), query.get("after"), order == "desc")

    def cut(self, items: list[body.InputItem]) -> tuple[list[body.InputItem], bool]:
        """Of all items, those of the page, and whether more follow. Raises FieldError."""
        if self.is_reversed:
            items = items[::-1]
        # Of items with one id the last: who asks for page after page comes to an end.
        places = [place + 1 for place, item in enumerate(items) if item.id == self.after]
        if self.after is not None and not places:
            raise FieldError("after", self.after, "the id of an item of this response")
        begin = places[-1] if places else 0
        end = begin + self.limit
        return items[begin:end], end < len(items)


def _encode_items(turns: Sequence[bytes], page: _Page) -> bytes:
    items = [item for turn in turns for item in _decode_items(turn)]
    for place, item in enumerate(items):
        item.id = item.id or f"item-{place}"
    shown, has_more = page.cut(items)
    first_id, last_id = (shown[0].id, shown[-1].id) if shown else (None, None)
    listing = {
        "object": "list",
        "data": shown,
        "first_id": first_id,
        "last_id": last_id,
        "has_more": has_more,
    }
    return msgspec.json.encode(listing)


def _send(response: bytes) -> Response:
    return Response(response, media_type="application/json")


def _refuse(response_id: str, why: str) -> ApiError:
    message = f"response {response_id!r}: {why}"
    return ApiError(HTTPStatus.BAD_REQUEST, message, param="response_id", code="invalid_state")
