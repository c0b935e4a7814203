"""What a request names instead of sending it: the response that it continues, and items of stored ones."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import NamedTuple

import msgspec

from ..bodies.responses import ConversationItem, InputItem, ItemReference
from ..errors import ApiError, FieldError
from ..serving import Caller, Serving
from .encoder import find_response_id
from .peers import Ask, Found

_ITEM_ALLOWED = "the id of an item of a response that is kept"
_decode_items = msgspec.json.Decoder(list[ConversationItem]).decode


class Past(NamedTuple):
    """The conversation before a request. turns: the same as JSON, turn by turn."""

    turns: tuple[bytes, ...] = ()
    items: Sequence[ConversationItem] = ()


class _Output(msgspec.Struct):
    """Of a stored response, what an item of it is read from."""

    output: list[ConversationItem]


async def load_past(serving: Serving, response_id: str | None, caller: Caller) -> Past:
    """The conversation that a response ends. Raises ApiErrors."""
    if response_id is None:
        return Past()
    field = "previous_response_id"
    found = await _find_response(serving, response_id, caller, field, "previous_response_not_found")
    if found.status != "ended":
        raise FieldError(field, response_id, "a response that has ended: this one is in progress")
    num_bytes, limits = sum(map(len, found.items)), serving.options.limits
    if num_bytes > limits.max_body_bytes or found.num_items > limits.max_messages:
        value = f"a conversation of {num_bytes} bytes and {found.num_items} items"
        allowed = f"at most {limits.max_body_bytes} (max_body_bytes) and {limits.max_messages} (max_messages)"
        raise FieldError(field, value, allowed)
    return Past(found.items, [item for turn in found.items for item in _decode_items(turn)])


async def resolve_references(
    serving: Serving, items: list[InputItem], caller: Caller
) -> list[ConversationItem]:
    """The items, with those of stored responses in place of what stands for them."""
    responses: dict[str, list[ConversationItem]] = {}
    resolved: list[ConversationItem] = []
    num_bytes, max_bytes = 0, serving.options.limits.max_body_bytes
    for place, item in enumerate(items):
        if not isinstance(item, ItemReference):
            resolved.append(item)
            continue
        field = f"input[{place}].id"
        if (named := find_response_id(item.id or "")) is None:
            raise FieldError(field, item.id, _ITEM_ALLOWED, "item_not_found")
        response_id, index = named
        if response_id not in responses:
            found = await _find_response(serving, response_id, caller, field, "item_not_found")
            responses[response_id] = msgspec.json.decode(found.response, type=_Output).output
        output = responses[response_id]
        if index >= len(output) or output[index].id != item.id:
            raise FieldError(field, item.id, _ITEM_ALLOWED)
        num_bytes += len(msgspec.json.encode(output[index]))
        if num_bytes > max_bytes:
            raise FieldError(field, item.id, f"items of at most {max_bytes} bytes in all (max_body_bytes)")
        resolved.append(output[index])
    return resolved


async def _find_response(serving: Serving, response_id: str, caller: Caller, field: str, code: str) -> Found:
    """A response that `field` names; as with OpenAI, a 400 when this caller has none such."""
    try:
        return await serving.responses.ask(Ask("find", response_id, caller.key_hash))
    except ApiError as error:
        if error.status != HTTPStatus.NOT_FOUND:
            raise
        raise ApiError(HTTPStatus.BAD_REQUEST, f"{field}: {error}", param=field, code=code) from None
