"""POST /v1/responses: items in, items out. What is kept can be continued by its id (responses_kept.py), and
its items can be named in place of sending them.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from http import HTTPStatus
from typing import Any, NamedTuple, TypeVar

import msgspec
from starlette.responses import Response

from ....ipc.decoding import decode_json, make_json_decoder
from ....ipc.params.sampling_params import RequestOutputKind, SamplingParams
from ...formats.offered_tools import read_tool_choice
from ...requests.input_processor import PreparedParams
from ..caller import Caller
from ..errors import ApiError, FieldError
from ..jobs.event_log import EventLog
from ..jobs.peers import ResponseQuery, ResponseReply
from ..jobs.store import Record
from ..serving import Serving
from ..stream import Json, respond
from ..text_process.jobs import Conversation
from . import responses_body as body
from .conversation import ParsedOutputs, parse_outputs, prepare_conversation
from .formats import read_format
from .prompts import decode_prompt
from .responses_background import Answer, BackgroundAnswer, encode_events, encode_stream_failure
from .responses_events import ResponseEncoder, find_response_id
from .responses_items import ToolOffer, is_unfinished, make_messages, read_items, read_offer
from .route import REFUSED_BY_ALL, PostRoute, Refused, is_off
from .sampling import make_params

_REPEATED_FIELDS = (
    *("instructions", "max_output_tokens", "max_tool_calls", "temperature", "top_p", "top_logprobs"),
    *("metadata", "previous_response_id", "reasoning", "user"),
)
_MAX_INLINE_ITEMS = 64  # are read in the event loop: half a millisecond
T = TypeVar("T")
U = TypeVar("U")
_ITEM_ALLOWED = "the id of an item of a response that is kept"
_decode_items = make_json_decoder(list[body.ConversationItem])


def _make_params(serving: Serving, request: body.ResponsesRequest, wants_logprobs: bool) -> SamplingParams:
    """As a chat's, with the fewer fields that /v1/responses has."""
    logprob_fields = {"logprobs": request.top_logprobs or 0} if wants_logprobs else {}
    if request.truncation == "auto":
        logprob_fields["truncate_prompt_tokens"] = -1
    return make_params(serving, request, request.max_output_tokens, **logprob_fields)


async def create_response(serving: Serving, request: body.ResponsesRequest, caller: Caller) -> Response:
    """Answer a conversation. Raises InputErrors and ApiErrors before anything is generated."""
    _check(serving, request)
    ignores_unknown = serving.options.unknown_fields == "ignore"
    offer = read_offer(request.tools, request.tool_choice, ignores_unknown)
    wants_logprobs = _LOGPROBS_ITEM in (request.include or ()) or request.top_logprobs is not None
    params = _make_params(serving, request, wants_logprobs)
    if wants_logprobs and (offer.tools or serving.is_thinking):
        # Which tokens are of the text is told by the events that come with them.
        params.output_kind = RequestOutputKind.DELTA
    serving.check_room(params, caller)
    answer, prompt, prepared = await _prepare(serving, request, caller, params, offer)
    response = answer.response
    if response["background"]:  # nobody would read a refusal later
        serving.check_room(params, caller, num_prompt_tokens=len(prompt))
    outputs = serving.generate(response["id"], prompt, prepared, caller, request)
    parsed = parse_outputs(serving, outputs, answer.reader)
    if response["background"]:
        return _run_in_background(serving, answer, parsed, bool(request.stream))
    events = answer.run(parsed)
    if request.stream:
        return serving.stream(encode_events(events), response["id"], answer.encode_failure)
    async with aclosing(events):
        async for _ in events:
            pass
    return respond(response, response["id"])


def _run_in_background(serving: Serving, answer: Answer, parsed: ParsedOutputs, has_events: bool) -> Response:
    """Have it run whoever listens: what it is at its beginning, or the events that it will have."""
    response = answer.response
    background = BackgroundAnswer(serving.responses, answer, EventLog() if has_events else None)
    background.begin()
    background.task = serving.run_beside(background.run(parsed))
    background.task.add_done_callback(background.end)
    if background.log is None:
        return respond(response, response["id"])
    return serving.stream(background.log.follow(0), response["id"], encode_stream_failure)


async def _prepare(
    serving: Serving, request: body.ResponsesRequest, caller: Caller, params: SamplingParams, offer: ToolOffer
) -> tuple[Answer, list[int], PreparedParams]:
    past = await load_past(serving, request.previous_response_id, caller)
    read = functools.partial(read_items, ignores_unknown=serving.options.unknown_fields == "ignore")
    items = await _run_beside(request.input, read, request.input)
    new_items = await resolve_references(serving, items, caller)
    make = functools.partial(_make_conversation, request, offer, past)
    conversation = await _run_beside([*past.items, *new_items], make, new_items)
    prompt, prepared, reader = await prepare_conversation(serving, caller, params, conversation)
    response = _make_response(serving, request, offer.declared)
    turns = (*past.turns, msgspec.json.encode(new_items)) if response["store"] else ()
    record = Record(caller.owner, caller.tenant, turns, len(past.items) + len(new_items))
    num_top = None if params.logprobs is None else request.top_logprobs or 0
    encoder = ResponseEncoder(response, offer.namespaces)
    decode = (
        functools.partial(decode_prompt, serving, caller=caller) if request.enable_response_messages else None
    )
    return Answer(serving, encoder, reader, record, num_top, decode), prompt, prepared


async def _run_beside(items: Sequence[Any], function: Callable[[T], U], argument: T) -> U:
    """`function(argument)`; with many items in a thread, which lets the event loop turn meanwhile."""
    is_short = isinstance(items, str) or len(items) <= _MAX_INLINE_ITEMS
    return function(argument) if is_short else await asyncio.to_thread(function, argument)


def _check(serving: Serving, request: body.ResponsesRequest) -> None:
    if request.background and not serving.responses.has_store:
        allowed = "false: this server keeps no responses (max_stored_bytes=0)"
        raise FieldError("background", True, allowed, "unsupported_field")
    if request.background and request.store is False:
        raise FieldError("store", False, "true with background=true: what runs on is asked for later")
    if request.max_output_tokens == 0:
        raise FieldError("max_output_tokens", 0, "an integer of at least 1")
    effort = request.reasoning.effort if request.reasoning else None
    if effort not in (None, "none") and not serving.is_thinking:
        raise FieldError("reasoning.effort", effort, "'none': this model does not think")
    max_items = serving.options.limits.max_messages
    if not isinstance(request.input, str) and len(request.input) > max_items:
        raise FieldError("input", f"{len(request.input)} items", f"at most {max_items} (max_messages)")


def _make_conversation(
    request: body.ResponsesRequest,
    offer: ToolOffer,
    past: History,
    new_items: Sequence[body.ConversationItem],
) -> Conversation:
    goes_on = bool(new_items) and is_unfinished(new_items[-1])
    return Conversation(
        messages=make_messages(request.instructions, [*past.items, *new_items], len(past.items)),
        add_generation_prompt=not goes_on,
        continue_final_message=goes_on,
        tools=offer.tools,
        choice=read_tool_choice(request.tool_choice),
        parallel=request.parallel_tool_calls is not False,
        variables=request.chat_template_kwargs,
        reasoning_effort=request.reasoning.effort if request.reasoning else None,
        shows_reasoning=request.include_reasoning is not False,
        format=read_format(
            "text.format", request.text.format if request.text else None, request.structured_outputs
        ),
        param="input",
        fields=offer.fields,
    )


def _make_response(serving: Serving, request: body.ResponsesRequest, tools: list[body.OfferedTool]) -> Json:
    """What an answer says from its beginning on, which repeats much of the request."""
    has_format = request.text is not None and request.text.format is not None
    return {
        "id": serving.responses.make_id(),
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "model": serving.find_name(request.model),
        "output": [],
        "usage": None,
        "error": None,
        "incomplete_details": None,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "store": serving.responses.has_store and request.store is not False,
        "background": bool(request.background),
        "text": request.text if has_format else {"format": {"type": "text"}},
        "tool_choice": request.tool_choice or "auto",
        "tools": tools,
        "truncation": request.truncation or "disabled",
        **{name: getattr(request, name) for name in _REPEATED_FIELDS},
    }


class History(NamedTuple):
    """The conversation before a request. turns: the same as JSON, turn by turn."""

    turns: tuple[bytes, ...] = ()
    items: Sequence[body.ConversationItem] = ()


class _Output(msgspec.Struct):
    """Of a stored response, what an item of it is read from."""

    output: list[body.ConversationItem]


async def load_past(serving: Serving, response_id: str | None, caller: Caller) -> History:
    """The conversation that a response ends. Raises ApiErrors."""
    if response_id is None:
        return History()
    field = "previous_response_id"
    kept = await _find_response(serving, response_id, caller, field, "previous_response_not_found")
    if kept.status != "ended":
        raise FieldError(field, response_id, "a response that has ended: this one is in progress")
    num_bytes, limits = sum(map(len, kept.items)), serving.options.limits
    if num_bytes > limits.max_body_bytes or kept.num_items > limits.max_messages:
        value = f"a conversation of {num_bytes} bytes and {kept.num_items} items"
        allowed = f"at most {limits.max_body_bytes} (max_body_bytes) and {limits.max_messages} (max_messages)"
        raise FieldError(field, value, allowed)
    return History(kept.items, [item for turn in kept.items for item in _decode_items(turn)])


async def resolve_references(
    serving: Serving, items: list[body.InputItem], caller: Caller
) -> list[body.ConversationItem]:
    """The items, with those of stored responses in place of what stands for them."""
    responses: dict[str, list[body.ConversationItem]] = {}
    resolved: list[body.ConversationItem] = []
    num_bytes, max_bytes = 0, serving.options.limits.max_body_bytes
    for place, item in enumerate(items):
        if not isinstance(item, body.ItemReference):
            resolved.append(item)
            continue
        field = f"input[{place}].id"
        if (named := find_response_id(item.id or "")) is None:
            raise FieldError(field, item.id, _ITEM_ALLOWED, "item_not_found")
        response_id, index = named
        if response_id not in responses:
            kept = await _find_response(serving, response_id, caller, field, "item_not_found")
            responses[response_id] = decode_json(kept.response, _Output).output
        output = responses[response_id]
        if index >= len(output) or output[index].id != item.id:
            raise FieldError(field, item.id, _ITEM_ALLOWED)
        num_bytes += len(msgspec.json.encode(output[index]))
        if num_bytes > max_bytes:
            raise FieldError(field, item.id, f"items of at most {max_bytes} bytes in all (max_body_bytes)")
        resolved.append(output[index])
    return resolved


async def _find_response(
    serving: Serving, response_id: str, caller: Caller, field: str, code: str
) -> ResponseReply:
    """A response that `field` names; as with OpenAI, a 400 when this caller has none such."""
    try:
        return await serving.responses.ask(ResponseQuery("find", response_id, caller.owner))
    except ApiError as error:
        if error.status != HTTPStatus.NOT_FOUND:
            raise
        raise ApiError(HTTPStatus.BAD_REQUEST, f"{field}: {error}", param=field, code=code) from None


_LOGPROBS_ITEM = "message.output_text.logprobs"
# Thoughts are in the answer in plain text, which is taken back: there is nothing to encrypt.
_INCLUDES = (_LOGPROBS_ITEM, "reasoning.encrypted_content")
REFUSED: Refused = REFUSED_BY_ALL | {
    "previous_input_messages": ("none: use input", is_off),
    "conversation": ("none: conversations are not stored", is_off),
    "prompt": ("none: prompt templates are not stored", is_off),
    "truncation": ("'auto' or 'disabled'", lambda value: value in ("auto", "disabled")),
    "include": (f"of {', '.join(map(repr, _INCLUDES))}", lambda value: set(value) <= set(_INCLUDES)),
}
ROUTES = [PostRoute("/v1/responses", body.ResponsesRequest, create_response, "generate", REFUSED)]
