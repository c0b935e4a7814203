"""POST /v1/chat/completions."""

from __future__ import annotations

import functools
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from starlette.responses import Response

from ...outputs import CompletionOutput, RequestOutput
from ..bodies.schema import (
    AnswerMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChoiceLogprobs,
    ChunkChoice,
    Delta,
)
from ..errors import FieldError
from ..serving import Caller, Serving, make_id
from ..stream import DONE, encode_event, respond
from .beam_search import read_beam_search
from .formats import find_format
from .logprobs import make_beside, make_chat_logprobs, make_prompt_logprobs
from .prompts import make_render_job, prepare_params, render_chat
from .sampling import make_chat_params
from .unsupported import CHAT_RULES, check_supported
from .usage import UsageCounter, take_last

Outputs = AsyncGenerator[RequestOutput, None]


async def create_chat_completion(
    serving: Serving, request: ChatCompletionRequest, caller: Caller
) -> Response:
    """Answer a conversation. Raises InputErrors and ApiErrors before anything is generated."""
    _check(request)
    search = read_beam_search(request)
    serving.check_model(request.model)
    params = make_chat_params(serving, request)
    serving.check_room(params, caller)
    source = find_format(request)
    prepared = await prepare_params(
        serving, params, caller, source, search=search, logprobs_name="top_logprobs"
    )
    max_model_len = serving.llm.facts.max_model_len
    echoed = _find_echo(request)
    job = make_render_job(request, max_model_len, prepared.truncation)
    prompt = await render_chat(serving, job, caller)
    request_id = make_id("chatcmpl")
    outputs = serving.generate(request_id, prompt, prepared, caller, request)
    if request.stream:
        chunks = _ChunkMaker(request, request_id, serving.model_id, echoed)
        return serving.stream(_stream(outputs, chunks, params.n), request_id)
    output = await take_last(outputs)
    for one in output.outputs:
        one.text = echoed + one.text
    body = await make_beside(output, lambda: _make_completion(request, request_id, serving.model_id, output))
    return respond(body, request_id)


def _check(request: ChatCompletionRequest) -> None:
    check_supported(request, CHAT_RULES)
    if request.top_logprobs is not None and not request.logprobs:
        raise FieldError("top_logprobs", request.top_logprobs, "only with logprobs=true")
    if request.stream_options is not None and not request.stream:
        raise FieldError("stream_options", "given", "only with stream=true")
    if request.echo and request.truncate_prompt_tokens is not None:  # nothing would bound its length
        raise FieldError("echo", True, "false with truncate_prompt_tokens")
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
    request: ChatCompletionRequest, request_id: str, model: str, output: RequestOutput
) -> ChatCompletion:
    counter = UsageCounter()
    counter.add(output)
    body = ChatCompletion(
        id=request_id,
        created=int(time.time()),
        model=model,
        choices=[
            ChatChoice(
                one.index,
                AnswerMessage(content=one.text),
                _logprobs_of(request, one),
                one.finish_reason,
                one.stop_reason,
            )
            for one in output.outputs
        ],
        usage=counter.usage(),
    )
    if output.prompt_logprobs is not None:
        body.prompt_logprobs = make_prompt_logprobs(output.prompt_logprobs)
    return body


def _logprobs_of(request: ChatCompletionRequest, output: CompletionOutput) -> ChoiceLogprobs | None:
    if output.logprobs is None or not _wants_logprobs(request):
        return None
    return make_chat_logprobs(output.logprobs, request.logprob_token_ids or request.top_logprobs or 0)


def _wants_logprobs(request: ChatCompletionRequest) -> bool:
    return bool(request.logprobs or request.logprob_token_ids)


async def _stream(outputs: Outputs, chunks: _ChunkMaker, n: int) -> AsyncGenerator[bytes, None]:
    counter = chunks.counter
    is_first = True
    async with aclosing(outputs):
        async for output in outputs:
            if counter is not None:
                counter.add(output)
            data = await chunks.make_beside(output) if chunks.has_logprobs else chunks.make(output)
            if is_first:
                is_first = False
                roles = functools.partial(chunks.make_roles, n, output)
                data = await make_beside(output, roles) + data
            if data:
                yield data
    yield chunks.make_last()


class _ChunkMaker:
    """Chunks of one stream. A chunk that only brings text is a fixed prefix, the text and a fixed suffix."""

    def __init__(self, request: ChatCompletionRequest, request_id: str, model: str, echoed: str) -> None:
        """`echoed`: what each answer begins with."""
        options = request.stream_options
        self._echoed = echoed
        self._request = request
        self._has_usage = options is not None and bool(options.include_usage)
        self._always_has_usage = options is not None and bool(options.continuous_usage_stats)
        self.has_logprobs = _wants_logprobs(request)
        self.counter = UsageCounter() if self._has_usage or self._always_has_usage else None
        self._head = ChatCompletionChunk(id=request_id, created=int(time.time()), model=model, choices=[])
        if self._has_usage:
            self._head.usage = None
        # The encoded head ends in `"choices":[]}` or `"choices":[],"usage":null}`.
        before, after = msgspec.json.encode(self._head).split(b'"choices":[]')
        self._prefix = b'data: %b"choices":[{"index":%%d,"delta":{"content":' % before.replace(b"%", b"%%")
        self._suffix = b'},"logprobs":null,"finish_reason":null}]%b\n\n' % after
        self._prefixes: dict[int, bytes] = {}
        self._encode = msgspec.json.Encoder().encode

    def make_roles(self, n: int, output: RequestOutput) -> bytes:
        """The first chunk of each answer says whose it is; made once."""
        echoed, self._echoed = self._echoed, ""
        delta = Delta(role="assistant", content=echoed)
        chunk = self._chunk([ChunkChoice(index, delta) for index in range(n)])
        if output.prompt_logprobs is not None:
            chunk.prompt_logprobs = make_prompt_logprobs(output.prompt_logprobs)
        return encode_event(chunk)

    def make(self, output: RequestOutput) -> bytes:
        """A chunk for each answer that has something new."""
        parts = [self._make_one(one) for one in output.outputs]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def make_beside(self, output: RequestOutput) -> bytes:
        """As `make`; not in the event loop where that takes long."""
        return await make_beside(output, lambda: self.make(output))

    def make_last(self) -> bytes:
        """Usage, if it was asked for, and the end."""
        if not self._has_usage or self.counter is None:
            return DONE
        chunk = msgspec.structs.replace(self._head, usage=self.counter.usage())
        return encode_event(chunk) + DONE

    def _make_one(self, output: CompletionOutput) -> bytes:
        logprobs = _logprobs_of(self._request, output) if output.logprobs is not None else None
        if output.finish_reason is None and logprobs is None and not self._always_has_usage:
            if not output.text:
                return b""
            prefix = self._prefixes.get(output.index)
            if prefix is None:
                prefix = self._prefixes[output.index] = self._prefix % output.index
            return prefix + self._encode(output.text) + self._suffix
        choice = ChunkChoice(
            output.index,
            Delta(content=output.text) if output.text else Delta(),
            logprobs,
            output.finish_reason,
        )
        if output.finish_reason is not None:
            choice.stop_reason = output.stop_reason
        return encode_event(self._chunk([choice]))

    def _chunk(self, choices: list[ChunkChoice]) -> ChatCompletionChunk:
        chunk = msgspec.structs.replace(self._head, choices=choices)
        if self._always_has_usage and self.counter is not None:
            chunk.usage = self.counter.usage()
        return chunk
