"""POST /v1/messages and /v1/messages/count_tokens, for Anthropic's clients."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from msgspec import UNSET
from starlette.responses import Response

from ...output_formats.answer_reader import AnswerReader
from ...output_formats.events import OutputEvent
from ...output_formats.offered_tools import check_tools
from ...outputs import CompletionOutput, RequestOutput
from ..bodies import messages as body
from ..endpoints.conversation import (
    ParsedOutputs,
    make_render_job,
    parse_outputs,
    prepare_conversation,
)
from ..endpoints.prompts import check_conversation
from ..endpoints.sampling import make_messages_params
from ..endpoints.usage import UsageCounter
from ..errors import ApiError, FieldError, as_api_error, encode_messages_error
from ..serving import Caller, Serving
from ..stream import respond
from ..text.jobs import Body, CountJob
from .message_events import BlockWriter, collect_blocks, encode_events
from .message_input import make_conversation

_BUDGET = "thinking.budget_tokens"


async def create_message(serving: Serving, request: body.MessagesRequest, caller: Caller) -> Response:
    """Answer a conversation for Anthropic's clients. Raises InputErrors and ApiErrors before it generates."""
    thinking = request.thinking
    if isinstance(thinking, body.ThinkingEnabled) and thinking.budget_tokens >= request.max_tokens:
        allowed = f"less than max_tokens={request.max_tokens}"
        raise FieldError(_BUDGET, thinking.budget_tokens, allowed)
    params = make_messages_params(serving, request)
    serving.check_room(params, caller)
    try:  # the conversation is held by nobody while the answer is generated
        prepared = await prepare_conversation(serving, caller, params, make_conversation(serving, request))
    except ApiError as error:
        raise _rename(error) from None
    reader = prepared.make_reader()
    answer = _Answer(serving.model_id, reader, getattr(thinking, "display", None) != "omitted")
    outputs = serving.generate(answer.id, prepared.prompt, prepared.params, caller, request)
    parsed = parse_outputs(serving, outputs, reader)
    if request.stream:
        return serving.stream(answer.stream(parsed), answer.id, answer.encode_failure)
    return respond(await answer.complete(parsed), answer.id)


def _rename(error: ApiError) -> ApiError:
    """The error, by the name that this API has for the field."""
    if error.param != "thinking_token_budget":
        return error
    text = str(error).replace(error.param, _BUDGET)
    return ApiError(error.status, text, param=_BUDGET, code=error.code, headers=error.headers)


async def count_message_tokens(
    serving: Serving, request: body.CountTokensRequest, caller: Caller
) -> Response:
    """Count the input tokens of a message that is not asked for."""
    conversation = make_conversation(serving, request)
    check_tools(conversation.tools, conversation.choice, conversation.fields)
    job = make_render_job(conversation)
    check_conversation(serving, job)
    answer = await serving.text.run(CountJob(source=job), caller.tenant)
    assert isinstance(answer, Body)
    return Response(answer.json, media_type="application/json")


class _Answer:
    """One message while it comes into being."""

    def __init__(self, model: str, reader: AnswerReader, shows_thinking: bool) -> None:
        self.id = f"msg_{uuid.uuid4().hex}"
        self._model = model
        self._reader = reader
        self._counter = UsageCounter()
        self._writer = BlockWriter(shows_thinking)

    async def complete(self, outputs: ParsedOutputs) -> body.Message:
        """The whole message."""
        told: list[body.MessageEvent] = []
        async with aclosing(outputs):
            async for output, answers in outputs:
                told += self._take(output, answers[0])
        return self._make_message(told)

    async def stream(self, outputs: ParsedOutputs) -> AsyncGenerator[bytes, None]:
        """The events of a stream, in Anthropic's order."""
        has_begun = False
        async with aclosing(outputs):
            async for output, answers in outputs:
                told = self._take(output, answers[0])
                if not has_begun:
                    has_begun = True
                    told = [body.MessageStart(message=self._make_message([])), body.Ping(), *told]
                if told:
                    yield encode_events(told)

    def encode_failure(self, error: Exception) -> bytes:
        """The event that ends a stream in which something went wrong."""
        return b"event: error\ndata: %b\n\n" % encode_messages_error(as_api_error(error), self.id)

    def _take(self, output: RequestOutput, events: Sequence[OutputEvent]) -> list[body.MessageEvent]:
        self._counter.add(output)
        told = [one for event in events for one in self._writer.take(event)]
        if output.finished:
            end = self._make_end(output.outputs[0])
            told += self._writer.end()
            told += [body.MessageDelta(delta=end, usage=self._make_usage()), body.MessageStop()]
        return told

    def _make_message(self, told: list[body.MessageEvent]) -> body.Message:
        content = collect_blocks(told)
        message = body.Message(id=self.id, model=self._model, content=content, usage=self._make_usage())
        for event in told:
            if isinstance(event, body.MessageDelta):
                end = event.delta
                message.stop_reason, message.stop_sequence = end.stop_reason, end.stop_sequence
                message.tool_parse_error = end.tool_parse_error
        return message

    def _make_end(self, one: CompletionOutput) -> body.MessageEnd:
        reason, sequence = _choose_stop_reason(one, self._writer.has_called)
        return body.MessageEnd(reason, sequence, True if self._reader.num_errors else UNSET)

    def _make_usage(self) -> body.MessagesUsage:
        usage = self._counter.usage()
        cached = usage.prompt_tokens_details.cached_tokens
        return body.MessagesUsage(
            input_tokens=usage.prompt_tokens - cached,
            output_tokens=usage.completion_tokens,
            cache_read_input_tokens=cached,
            output_tokens_details=body.OutputTokensDetails(self._reader.num_reasoning_tokens or 0),
        )


def _choose_stop_reason(one: CompletionOutput, has_called: bool) -> tuple[body.StopReason, str | None]:
    """Why a turn has ended, and the stop sequence if that was it."""
    match one.finish_reason:
        case "length":
            return "max_tokens", None
        case "abort":
            return "pause_turn", None
        case _ if has_called:
            return "tool_use", None
        case _ if isinstance(one.stop_reason, str):
            return "stop_sequence", one.stop_reason
        case _:
            return "end_turn", None
