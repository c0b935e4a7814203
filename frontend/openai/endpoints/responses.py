"""POST /v1/responses: text in, text out. Nothing is stored, so a response cannot be continued by its id."""

from __future__ import annotations

import functools
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Literal

import msgspec
from starlette.responses import Response

from ...outputs import CompletionOutput, RequestOutput
from ..bodies.formats import ResponsesText, TextFormat
from ..bodies.schema import ChatMessage, ResponsesRequest, TokenLogprob
from ..errors import FieldError, as_api_error
from ..serving import Caller, Serving, make_id
from ..stream import encode_named_event, respond
from ..text.jobs import RenderJob
from .formats import find_format
from .logprobs import as_json, make_beside, make_chat_logprobs
from .prompts import prepare_params, render_chat
from .sampling import make_responses_params
from .unsupported import LOGPROBS_ITEM, RESPONSES_RULES, check_supported
from .usage import UsageCounter


class OutputText(msgspec.Struct, kw_only=True):
    """The text of an answer."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class OutputMessage(msgspec.Struct, kw_only=True):
    """The one item of an answer."""

    type: Literal["message"] = "message"
    id: str
    status: str
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class InputTokensDetails(msgspec.Struct):
    """Input tokens that the prefix cache already held."""

    cached_tokens: int


class OutputTokensDetails(msgspec.Struct):
    """Quire's models answer without a hidden part."""

    reasoning_tokens: int = 0


class ResponsesUsage(msgspec.Struct):
    """Counts of tokens."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct):
    """Why an answer ended early."""

    reason: str


class ResponseError(msgspec.Struct):
    """Why an answer failed."""

    code: str
    message: str


class ResponsesResponse(msgspec.Struct, kw_only=True):
    """Answer of /v1/responses, and what the events of a stream carry."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: str
    model: str
    output: list[OutputMessage] = []
    usage: ResponsesUsage | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool = True
    previous_response_id: None = None
    store: bool = False
    text: ResponsesText = ResponsesText(TextFormat())
    tool_choice: str = "auto"
    tools: list[Any] = []
    truncation: str = "disabled"
    user: str | None = None


class ResponseEvent(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An event of a stream; which fields it has depends on its type. sequence_number counts from 0."""

    type: str
    sequence_number: int
    response: ResponsesResponse | None = None
    item_id: str | None = None
    output_index: int | None = None
    content_index: int | None = None
    item: OutputMessage | None = None
    part: OutputText | None = None
    delta: str | None = None
    text: str | None = None
    logprobs: list[TokenLogprob] | None = None


async def create_response(serving: Serving, request: ResponsesRequest, caller: Caller) -> Response:
    """Answer a conversation. Raises InputErrors and ApiErrors before anything is generated."""
    check_supported(request, RESPONSES_RULES)
    serving.check_model(request.model)
    if request.max_output_tokens == 0:
        raise FieldError("max_output_tokens", 0, "an integer of at least 1")
    answer = _Answer(request, serving)
    params = make_responses_params(serving, request, answer.wants_logprobs)
    serving.check_room(params, caller)
    source = find_format(request)
    prepared = await prepare_params(serving, params, caller, source, logprobs_name="top_logprobs")
    max_model_len = serving.llm.facts.max_model_len
    job = RenderJob(
        messages=_messages_of(request),
        param="input",
        max_model_len=max_model_len,
        truncation=prepared.truncation,
    )
    prompt = await render_chat(serving, job, caller)
    outputs = serving.generate(answer.response.id, prompt, prepared, caller, request)
    if request.stream:
        events = answer.stream(outputs)
        return serving.stream(events, answer.response.id, answer.encode_failure)
    body = await answer.complete(outputs)
    return respond(body, answer.response.id)


def _messages_of(request: ResponsesRequest) -> list[ChatMessage]:
    items = request.input
    messages = [ChatMessage(role="system", content=request.instructions)] if request.instructions else []
    if isinstance(items, str):
        return [*messages, ChatMessage(role="user", content=items)]
    if not items:
        raise FieldError("input", items, "a text, or a list of at least one message")
    for place, item in enumerate(items):
        if item.type != "message":
            raise FieldError(f"input[{place}].type", item.type, "'message'")
        role = "system" if item.role == "developer" else item.role
        messages.append(ChatMessage(role=role, content=item.content))
    return messages


class _Answer:
    """One response while it comes into being."""

    def __init__(self, request: ResponsesRequest, serving: Serving) -> None:
        self._num_top = request.top_logprobs or 0
        self.wants_logprobs = LOGPROBS_ITEM in (request.include or ()) or request.top_logprobs is not None
        self._message_id = make_id("msg")
        self._place: dict[str, Any] = {"item_id": self._message_id, "output_index": 0, "content_index": 0}
        self._counter = UsageCounter()
        self._num_events = 0
        self._text = ""
        self._logprobs: list[TokenLogprob] = []
        self.response = ResponsesResponse(
            id=make_id("resp"),
            created_at=int(time.time()),
            status="in_progress",
            model=serving.model_id,
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            metadata=request.metadata,
            truncation=request.truncation or "disabled",
            user=request.user,
        )
        if request.text is not None and request.text.format is not None:
            self.response.text = request.text

    async def complete(self, outputs: AsyncGenerator[RequestOutput, None]) -> ResponsesResponse:
        """The whole answer."""
        async with aclosing(outputs):
            async for output in outputs:
                await self._take_beside(output)
        return self.response

    async def stream(self, outputs: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[bytes, None]:
        """The events of a stream, in OpenAI's order."""
        has_begun = False
        async with aclosing(outputs):
            async for output in outputs:
                if not has_begun:
                    has_begun = True
                    yield self._make_beginning()
                num_known = len(self._logprobs)
                await self._take_beside(output)
                if output.outputs[0].text:
                    yield self._event(
                        "response.output_text.delta",
                        **self._place,
                        delta=output.outputs[0].text,
                        logprobs=self._logprobs[num_known:],
                    )
        yield self._make_end()

    def encode_failure(self, error: Exception) -> bytes:
        """The event that ends a stream in which something went wrong."""
        api_error = as_api_error(error)
        self.response.status = "failed"
        self.response.error = ResponseError(api_error.code or "server_error", str(api_error))
        return self._event("response.failed", response=self.response)

    async def _take_beside(self, output: RequestOutput) -> None:
        """As `_take`; not in the event loop where that takes long."""
        if self.wants_logprobs:
            await make_beside(output, functools.partial(self._take, output))
        else:
            self._take(output)

    def _take(self, output: RequestOutput) -> None:
        """Take a delta, or the final output, and end the response with it."""
        self._counter.add(output)
        one = output.outputs[0]
        self._text += one.text
        if self.wants_logprobs and one.logprobs is not None:
            self._logprobs += map(as_json, make_chat_logprobs(one.logprobs, self._num_top).content)
        if output.finished:
            self._end(one)

    def _end(self, one: CompletionOutput) -> None:
        is_whole = one.finish_reason == "stop"
        self.response.status = "completed" if is_whole else "incomplete"
        if not is_whole:
            reason = "max_output_tokens" if one.finish_reason == "length" else str(one.finish_reason)
            self.response.incomplete_details = IncompleteDetails(reason)
        self.response.output = [self._message(self.response.status)]
        usage = self._counter.usage()
        self.response.usage = ResponsesUsage(
            usage.prompt_tokens,
            InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
            usage.completion_tokens,
            OutputTokensDetails(),
            usage.total_tokens,
        )

    def _message(self, status: str) -> OutputMessage:
        return OutputMessage(id=self._message_id, status=status, content=[self._part()])

    def _part(self) -> OutputText:
        return OutputText(text=self._text, logprobs=self._logprobs)

    def _make_beginning(self) -> bytes:
        empty = OutputMessage(id=self._message_id, status="in_progress", content=[])
        return b"".join(
            [
                self._event("response.created", response=self.response),
                self._event("response.in_progress", response=self.response),
                self._event("response.output_item.added", output_index=0, item=empty),
                self._event("response.content_part.added", **self._place, part=OutputText(text="")),
            ]
        )

    def _make_end(self) -> bytes:
        status = self.response.status
        return b"".join(
            [
                self._event(
                    "response.output_text.done", **self._place, text=self._text, logprobs=self._logprobs
                ),
                self._event("response.content_part.done", **self._place, part=self._part()),
                self._event("response.output_item.done", output_index=0, item=self._message(status)),
                self._event(f"response.{status}", response=self.response),
            ]
        )

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = ResponseEvent(type=kind, sequence_number=self._num_events, **fields)
        self._num_events += 1
        return encode_named_event(kind, event)
