"""POST /v1/responses: items in, items out. What is kept can be continued by its id (stored.py)."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response

from ....ipc.sampling_params import RequestOutputKind, SamplingParams
from ...output_formats.answer_reader import AnswerReader
from ...output_formats.offered_tools import read_tool_choice
from ...outputs import RequestOutput
from ..bodies.lenient import is_lenient, make_lenient
from ..bodies.responses import (
    ConversationItem,
    InputItems,
    InputTokensDetails,
    OfferedTool,
    OfferedTools,
    OutputTokensDetails,
    ResponseEvent,
    ResponsesRequest,
    ResponsesResponse,
    ResponsesUsage,
)
from ..bodies.schema import TokenLogprob
from ..endpoints.conversation import (
    Conversation,
    ParsedOutputs,
    PreparedConversation,
    parse_outputs,
    prepare_conversation,
)
from ..endpoints.formats import find_format
from ..endpoints.logprobs import as_json, make_beside, make_chat_logprobs
from ..endpoints.sampling import make_responses_params
from ..endpoints.unsupported import LOGPROBS_ITEM, RESPONSES_RULES, check_supported
from ..endpoints.usage import UsageCounter
from ..errors import FieldError, as_api_error
from ..serving import Caller, Serving
from ..stream import encode_named_event, respond
from .encoder import ResponseEncoder
from .items import make_messages, read_items
from .past import Past, load_past, resolve_references
from .store import Record
from .tools import ToolOffer, read_offer

_MAX_INLINE_ITEMS = 64  # are read in the event loop: half a millisecond
T = TypeVar("T")
U = TypeVar("U")


async def create_response(serving: Serving, request: ResponsesRequest, caller: Caller) -> Response:
    """Answer a conversation. Raises InputErrors and ApiErrors before anything is generated."""
    _check(serving, request)
    tools_kind = make_lenient(OfferedTools) if is_lenient(request) else OfferedTools
    offer = read_offer(request.tools, request.tool_choice, tools_kind)
    wants_logprobs = LOGPROBS_ITEM in (request.include or ()) or request.top_logprobs is not None
    params = make_responses_params(serving, request, wants_logprobs)
    if wants_logprobs and (offer.tools or serving.is_thinking):
        # Which tokens are of the text is told by the events that come with them.
        params.output_kind = RequestOutputKind.DELTA
    serving.check_room(params, caller)
    answer, prepared = await _prepare(serving, request, caller, params, offer)
    response = answer.response
    outputs = serving.generate(response.id, prepared.prompt, prepared.params, caller, request)
    events = answer.run(parse_outputs(serving, outputs, answer.reader))
    if request.stream:
        return serving.stream(_encode(events), response.id, answer.encode_failure)
    async with aclosing(events):
        async for _ in events:
            pass
    return respond(response, response.id)


async def _prepare(
    serving: Serving, request: ResponsesRequest, caller: Caller, params: SamplingParams, offer: ToolOffer
) -> tuple[_Answer, PreparedConversation]:
    past = await load_past(serving, request.previous_response_id, caller)
    items_kind = make_lenient(InputItems) if is_lenient(request) else InputItems
    read = functools.partial(read_items, kind=items_kind)
    items = await _run_beside(request.input, read, request.input)
    own = await resolve_references(serving, items, caller)
    make = functools.partial(_make_conversation, request, offer, past)
    conversation = await _run_beside([*past.items, *own], make, own)
    prepared = await prepare_conversation(serving, caller, params, conversation)
    response = _make_response(serving, request, offer.given)
    turns = (*past.turns, msgspec.json.encode(own)) if response.store else ()
    record = Record(caller.key_hash, caller.tenant, turns, len(past.items) + len(own))
    num_top = None if params.logprobs is None else request.top_logprobs or 0
    encoder = ResponseEncoder(response, offer.namespaces)
    return _Answer(serving, encoder, prepared.make_reader(), record, num_top), prepared


async def _run_beside(items: Sequence[Any], function: Callable[[T], U], argument: T) -> U:
    """`function(argument)`; with many items in a thread, which lets the event loop turn meanwhile."""
    is_short = isinstance(items, str) or len(items) <= _MAX_INLINE_ITEMS
    return function(argument) if is_short else await asyncio.to_thread(function, argument)


def _check(serving: Serving, request: ResponsesRequest) -> None:
    check_supported(request, RESPONSES_RULES)
    if request.max_output_tokens == 0:
        raise FieldError("max_output_tokens", 0, "an integer of at least 1")
    effort = request.reasoning.effort if request.reasoning else None
    if effort not in (None, "none") and not serving.is_thinking:
        raise FieldError("reasoning.effort", effort, "'none': this model does not think")
    if request.text is not None and request.text.verbosity not in (None, "medium"):
        raise FieldError("text.verbosity", request.text.verbosity, "'medium': verbosity is not supported")
    max_items = serving.options.limits.max_messages
    if not isinstance(request.input, str) and len(request.input) > max_items:
        raise FieldError("input", f"{len(request.input)} items", f"at most {max_items} (max_messages)")


def _make_conversation(
    request: ResponsesRequest, offer: ToolOffer, past: Past, own: Sequence[ConversationItem]
) -> Conversation:
    return Conversation(
        messages=make_messages(request.instructions, [*past.items, *own], len(past.items)),
        tools=offer.tools,
        choice=read_tool_choice(request.tool_choice),
        parallel=request.parallel_tool_calls is not False,
        variables=request.chat_template_kwargs,
        reasoning_effort=request.reasoning.effort if request.reasoning else None,
        shows_reasoning=request.include_reasoning is not False,
        format=find_format(request),
        param="input",
        fields=offer.fields,
    )


def _make_response(
    serving: Serving, request: ResponsesRequest, tools: list[OfferedTool]
) -> ResponsesResponse:
    """What an answer says from its beginning on, which repeats much of the request."""
    response = ResponsesResponse(
        id=serving.responses.make_id(),
        created_at=int(time.time()),
        model=serving.model_id,
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        temperature=request.temperature,
        top_p=request.top_p,
        top_logprobs=request.top_logprobs,
        metadata=request.metadata,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        store=serving.responses.has_store and request.store is not False,
        reasoning=request.reasoning,
        tool_choice=request.tool_choice or "auto",
        tools=tools,
        truncation=request.truncation or "disabled",
        user=request.user,
    )
    if request.text is not None and request.text.format is not None:
        response.text = request.text
    return response


async def _encode(events: AsyncGenerator[list[ResponseEvent], None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        async for some in events:
            if some:
                yield _join(some)


def _join(events: list[ResponseEvent]) -> bytes:
    return b"".join(encode_named_event(event.type, event) for event in events)


class _Answer:
    """One response while it comes into being."""

    def __init__(
        self,
        serving: Serving,
        encoder: ResponseEncoder,
        reader: AnswerReader,
        record: Record,
        num_top: int | None,
    ) -> None:
        """num_top: likeliest tokens beside each one of the text, None for no logprobs."""
        self.response = encoder.response
        self.reader = reader
        self._registry = serving.responses
        self._abort = serving.llm.abort
        self._encoder = encoder
        self._counter = UsageCounter()
        self._record: Record | None = record
        self._num_top = num_top

    async def run(self, parsed: ParsedOutputs) -> AsyncGenerator[list[ResponseEvent], None]:
        """The events, those of an output at a time. The response is complete, and kept, when they end."""
        record, self._record = self._record, None
        assert record is not None
        async with aclosing(parsed):
            owner = record.owner
            self._registry.begin(self.response, record, self._abort)
            del record  # from here on it is counted, and may be dropped
            try:
                begun = self._encoder.begin
                async for output, events in parsed:
                    if begun is not None:
                        yield begun()
                        begun = None
                    told = self._encoder.take(events[0], await self._make_logprobs(output))
                    self._counter.add(output)
                    if output.finished:
                        told += self._end(output)
                        self._registry.finish(self.response)
                    yield told
            finally:
                self._registry.end(self.response.id, owner)

    def encode_failure(self, error: Exception) -> bytes:
        """The event that ends a stream in which something went wrong."""
        api_error = as_api_error(error)
        return _join(self._encoder.fail(api_error.code or "server_error", str(api_error)))

    def _end(self, output: RequestOutput) -> list[ResponseEvent]:
        usage = self._counter.usage()
        if self.reader.has_errors(0):
            self.response.tool_parse_error = True
        return self._encoder.end(
            output.outputs[0].finish_reason,
            ResponsesUsage(
                usage.prompt_tokens,
                InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
                usage.completion_tokens,
                OutputTokensDetails(self.reader.num_reasoning_tokens or 0),
                usage.total_tokens,
            ),
        )

    async def _make_logprobs(self, output: RequestOutput) -> list[TokenLogprob]:
        """As JSON; not in the event loop where that takes long."""
        positions = output.outputs[0].logprobs
        if self._num_top is None or positions is None:
            return []
        make = functools.partial(make_chat_logprobs, positions, self._num_top)
        return await make_beside(output, lambda: list(map(as_json, make().content)))
