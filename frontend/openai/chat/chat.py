"""POST /v1/chat/completions."""

from __future__ import annotations

import functools
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from starlette.responses import Response

from ...output_formats.answer_reader import AnswerReader
from ...output_formats.events import AssistantMessage, OutputEvent
from ...outputs import CompletionOutput, RequestOutput
from ..bodies.chat_answers import AnswerFunction, AnswerMessage, AnswerToolCall, ChatChoice, ChatCompletion
from ..bodies.schema import ChatCompletionRequest
from ..endpoints.beam_search import read_beam_search
from ..endpoints.conversation import parse_outputs, prepare_conversation, read_output
from ..endpoints.logprobs import make_beside, make_prompt_logprobs
from ..endpoints.sampling import make_chat_params
from ..endpoints.unsupported import CHAT_RULES, check_supported
from ..endpoints.usage import UsageCounter, take_last
from ..errors import FieldError
from ..serving import Caller, Serving, make_id
from ..stream import respond
from .chat_chunks import ChunkMaker, choose_finish_reason, choose_logprobs, has_whole_call
from .chat_conversation import make_conversation

Outputs = AsyncGenerator[RequestOutput, None]


async def create_chat_completion(
    serving: Serving, request: ChatCompletionRequest, caller: Caller
) -> Response:
    """Answer a conversation. Raises InputErrors and ApiErrors before anything is generated."""
    _check(serving, request)
    search = read_beam_search(request)
    params = make_chat_params(serving, request)
    serving.check_room(params, caller)
    echoed = _find_echo(request)
    prepared = await prepare_conversation(serving, caller, params, make_conversation(request), search=search)
    request_id = make_id("chatcmpl")
    outputs = serving.generate(request_id, prepared.prompt, prepared.params, caller, request)
    reader = prepared.make_reader()
    if request.stream:
        forces_usage = serving.options.enable_force_include_usage
        chunks = ChunkMaker(request, request_id, serving.model_id, echoed, reader, forces_usage)
        return serving.stream(_stream(serving, outputs, chunks, params.n, reader), request_id)
    parsed = await take_last(parse_outputs(serving, outputs, reader))
    body = await make_beside(
        parsed[0],
        lambda: _make_completion(request, request_id, serving.model_id, parsed, reader, echoed),
    )
    return respond(body, request_id)


def _check(serving: Serving, request: ChatCompletionRequest) -> None:
    check_supported(request, CHAT_RULES)
    if request.reasoning_effort not in (None, "none") and not serving.is_thinking:
        raise FieldError("reasoning_effort", request.reasoning_effort, "'none': this model does not think")
    if request.top_logprobs is not None and not request.logprobs:
        raise FieldError("top_logprobs", request.top_logprobs, "only with logprobs=true")
    if request.stream_options is not None and not request.stream:
        raise FieldError("stream_options", "given", "only with stream=true")
    if request.echo and request.truncate_prompt_tokens is not None:  # nothing would bound its length
        raise FieldError("echo", True, "false with truncate_prompt_tokens")
    for name in ("echo", "use_beam_search"):
        if request.tools and getattr(request, name):
            raise FieldError(name, True, "false with tools")
    for name in ("max_completion_tokens", "max_tokens"):
        if getattr(request, name) == 0:
            raise FieldError(name, 0, "an integer of at least 1")


def _find_echo(request: ChatCompletionRequest) -> str:
    """With `echo` an answer begins with the last message's text, if that is the assistant's, too."""
    last = request.messages[-1]
    if not request.echo or last.role != "assistant" or last.content is None:
        return ""
    return last.content if isinstance(last.content, str) else "".join(p.text or "" for p in last.content)


def _make_completion(
    request: ChatCompletionRequest,
    request_id: str,
    model: str,
    parsed: tuple[RequestOutput, Sequence[Sequence[OutputEvent]]],
    reader: AnswerReader,
    echoed: str,
) -> ChatCompletion:
    output, events = parsed
    counter = UsageCounter()
    counter.add(output)
    counter.num_reasoning_tokens = reader.num_reasoning_tokens
    body = ChatCompletion(
        id=request_id,
        created=int(time.time()),
        model=model,
        choices=[
            _make_choice(request, one, own, reader, echoed)
            for one, own in zip(output.outputs, events, strict=True)
        ],
        usage=counter.usage(),
    )
    if request.return_token_ids:
        body.prompt_token_ids = output.prompt_token_ids
    if output.prompt_logprobs is not None:
        body.prompt_logprobs = make_prompt_logprobs(output.prompt_logprobs)
    return body


def _make_choice(
    request: ChatCompletionRequest,
    one: CompletionOutput,
    events: Sequence[OutputEvent],
    reader: AnswerReader,
    echoed: str,
) -> ChatChoice:
    said = AssistantMessage()
    for event in events:
        said.add(event)
    message = AnswerMessage(content=echoed + said.content)
    if said.reasoning:
        message.reasoning_content = message.reasoning = said.reasoning
    if said.tool_calls:
        message.content = message.content or None
        message.tool_calls = [
            AnswerToolCall(call.call_id, AnswerFunction(call.name, call.arguments))
            for call in said.tool_calls
        ]
    choice = ChatChoice(
        one.index,
        message,
        choose_logprobs(request, one),
        choose_finish_reason(one.finish_reason, has_whole_call(events)),
        one.stop_reason,
        one.token_ids if request.return_token_ids else None,
    )
    if reader.has_errors(one.index):
        choice.tool_parse_error = True
    return choice


async def _stream(
    serving: Serving, outputs: Outputs, chunks: ChunkMaker, n: int, reader: AnswerReader
) -> AsyncGenerator[bytes, None]:
    counter, is_plain = chunks.counter, reader.is_plain
    is_first = True
    async with aclosing(outputs):
        async for output in outputs:
            events = None if is_plain else await read_output(serving, output, reader)
            if counter is not None:
                counter.add(output)
                counter.num_reasoning_tokens = reader.num_reasoning_tokens
            if chunks.has_logprobs:
                data = await make_beside(output, functools.partial(chunks.make, output, events))
            else:
                data = chunks.make(output, events)
            if is_first:
                is_first = False
                roles = functools.partial(chunks.make_roles, n, output)
                data = await make_beside(output, roles) + data
            if data:
                yield data
    yield chunks.make_last()
