"""POST /v1/chat/completions."""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.responses import Response

from ....ipc.params.param_fields import MAX_INT
from ....ipc.params.sampling_params import SamplingParams
from ... import events as turn
from ...formats.answer_reader import AnswerReader
from ...formats.offered_tools import check_num_tools, read_tool_choice
from ...outputs import CompletionOutput, RequestOutput
from ...text.tokenizer import Tokenizer
from ...tools import Tool
from ..bodies.schema import (
    KNOWN_TYPES_OF_CHATS,
    ChatMessage,
    ChoiceLogprobs,
    NumTokens,
    PromptLogprobs,
    SamplingFields,
    TokenizeRequest,
    ToolParam,
    Usage,
)
from ..caller import Caller
from ..errors import FieldError
from ..limits import MAX_TOP_LOGPROBS
from ..serving import Serving, make_id
from ..stream import DONE, ChunkTemplate, encode_event, respond
from ..text_process.jobs import Conversation
from .conversation import parse_outputs, prepare_conversation, read_output
from .formats import find_format
from .logprobs import make_beside, make_chat_logprobs, make_prompt_logprobs
from .route import REFUSED_BY_ALL, PostRoute, Refused, is_off
from .sampling import first_given, make_params, read_beam_search
from .usage import UsageCounter, choose_usage, take_last

Outputs = AsyncGenerator[RequestOutput, None]


class AnswerFunction(msgspec.Struct, omit_defaults=True):
    """What is called. arguments: a JSON object's text; in chunks, more of it."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class AnswerToolCall(msgspec.Struct):
    """A call of a tool."""

    id: str
    function: AnswerFunction
    type: Literal["function"] = "function"


class AnswerMessage(msgspec.Struct, kw_only=True):
    """The assistant's message. Thoughts have both of the names that clients read."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[AnswerToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    tool_parse_error: bool | UnsetType = UNSET  # true: a call could not be read and stays in the content


class ChatCompletion(msgspec.Struct, kw_only=True):
    """Answer of /v1/chat/completions. prompt_token_ids, token_ids of choices: with return_token_ids."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class DeltaToolCall(msgspec.Struct, kw_only=True):
    """What is new of a call: first its id and name, then its arguments."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: AnswerFunction


class Delta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What is new of a message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[DeltaToolCall] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct):
    """What is new of one answer."""

    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    tool_parse_error: bool | UnsetType = UNSET  # as in a ChatChoice


class ChatCompletionChunk(msgspec.Struct, kw_only=True):
    """A chunk of a streamed chat. prompt_token_ids: in the first, with return_token_ids."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatCompletionRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    KNOWN_TYPES: ClassVar = KNOWN_TYPES_OF_CHATS
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: NumTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=-1, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[ToolParam] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: Annotated[int, Meta(ge=-1, le=MAX_INT)] | None = None  # -1: no limit
    functions: list[Any] | None = None
    function_call: Any = None
    reasoning_effort: str | None = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None
    verbosity: str | None = None
    documents: Annotated[list[dict[str, Any]], Meta(description="for the chat template")] | None = None
    return_prompt_text: bool | None = None


def _make_params(serving: Serving, request: ChatCompletionRequest) -> SamplingParams:
    """Without a limit the answer may fill what is left of the context."""
    asks = request.logprobs and not request.logprob_token_ids  # which go before the likeliest
    own = {"logprobs": request.top_logprobs or 0} if asks else {}
    max_tokens = first_given(request.max_completion_tokens, request.max_tokens)
    return make_params(serving, request, max_tokens, **own)


async def create_chat_completion(
    serving: Serving, request: ChatCompletionRequest, caller: Caller
) -> Response:
    """Answer a conversation. Raises InputErrors and ApiErrors before anything is generated."""
    _check(serving, request)
    search = read_beam_search(request)
    params = _make_params(serving, request)
    serving.check_room(params, caller)
    echoed = _find_echo(request)
    prompt, prepared, reader = await prepare_conversation(
        serving, caller, params, make_conversation(request), search=search
    )
    request_id = make_id("chatcmpl")
    outputs = serving.generate(request_id, prompt, prepared, caller, request)
    if request.stream:
        forces_usage = serving.options.enable_force_include_usage
        chunks = ChunkMaker(
            request, request_id, serving.model_id, echoed, reader, serving.tokenizer, forces_usage
        )
        return serving.stream(_stream(serving, outputs, chunks, params.n, reader), request_id)
    parsed = await take_last(parse_outputs(serving, outputs, reader))
    body = await make_beside(
        parsed[0],
        lambda: _make_completion(
            request, request_id, serving.model_id, parsed, reader, serving.tokenizer, echoed
        ),
    )
    return respond(body, request_id)


def _check(serving: Serving, request: ChatCompletionRequest) -> None:
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
    parsed: tuple[RequestOutput, Sequence[Sequence[turn.OutputEvent]]],
    reader: AnswerReader,
    tokenizer: Tokenizer,
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
            _make_choice(request, one, own, reader, tokenizer, echoed)
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
    events: Sequence[turn.OutputEvent],
    reader: AnswerReader,
    tokenizer: Tokenizer,
    echoed: str,
) -> ChatChoice:
    said = turn.AssistantMessage()
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
        choose_logprobs(request, one, tokenizer),
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


def make_conversation(request: ChatCompletionRequest) -> Conversation:
    """What a chat asks for. Raises InputErrors."""
    conversation = make_prompt_conversation(request)
    conversation.choice = read_tool_choice(request.tool_choice)
    conversation.parallel = request.parallel_tool_calls is not False
    conversation.reasoning_effort = request.reasoning_effort
    conversation.thinking_token_budget = request.thinking_token_budget
    if conversation.thinking_token_budget == -1:  # vLLM's
        conversation.thinking_token_budget = None
    if request.documents is not None:
        conversation.variables = {"documents": request.documents, **(request.chat_template_kwargs or {})}
    conversation.shows_reasoning = request.include_reasoning is not False
    conversation.format = find_format(request)
    return conversation


def make_prompt_conversation(request: ChatCompletionRequest | TokenizeRequest) -> Conversation:
    """What of a body the prompt is made of. Raises InputErrors."""
    given = request.tools or ()
    check_num_tools(len(given))
    continues = bool(request.continue_final_message)
    adds = request.add_generation_prompt
    return Conversation(
        messages=request.messages or [],
        tools=[_make_tool(number, tool) for number, tool in enumerate(given)],
        variables=request.chat_template_kwargs,
        add_generation_prompt=not continues if adds is None else adds,
        continue_final_message=continues,
        add_special_tokens=bool(request.add_special_tokens),
    )


def _make_tool(number: int, given: ToolParam) -> Tool:
    if given.type != "function":
        raise FieldError(f"tools[{number}].type", given.type, "'function'")
    function = given.function
    return Tool(function.name, function.description, function.parameters, bool(function.strict))


class ChunkMaker:
    """Chunks of one stream."""

    def __init__(
        self,
        request: ChatCompletionRequest,
        request_id: str,
        model: str,
        echoed: str,
        reader: AnswerReader,
        tokenizer: Tokenizer,
        forces_usage: bool = False,
    ) -> None:
        """`echoed`: what each answer begins with. `reader`: knows which calls could not be read."""
        self._echoed = echoed
        self._request = request
        self._reader, self._tokenizer = reader, tokenizer
        self._has_usage, self._always_has_usage = choose_usage(request.stream_options, forces_usage)
        self._says_more = self._always_has_usage or bool(request.return_token_ids)  # in each chunk
        self.has_logprobs = wants_logprobs(request)
        self.counter = UsageCounter() if self._has_usage else None
        self._head = ChatCompletionChunk(id=request_id, created=int(time.time()), model=model, choices=[])
        if self._has_usage:
            self._head.usage = None
        after = b',"logprobs":null,"finish_reason":null'
        self._texts = ChunkTemplate(self._head, b'"delta":{"content":', b"}" + after)
        self._deltas = ChunkTemplate(self._head, b'"delta":', after)
        self._has_calls: defaultdict[int, bool] = defaultdict(bool)  # by answer

    def make_roles(self, n: int, output: RequestOutput) -> bytes:
        """The first chunk of each answer says whose it is; made once."""
        echoed, self._echoed = self._echoed, ""
        delta = Delta(role="assistant", content=echoed)
        chunk = self._chunk([ChunkChoice(index, delta) for index in range(n)])
        if output.prompt_logprobs is not None:
            chunk.prompt_logprobs = make_prompt_logprobs(output.prompt_logprobs)
        if self._request.return_token_ids:
            chunk.prompt_token_ids = output.prompt_token_ids
        return encode_event(chunk)

    def make(self, output: RequestOutput, events: Sequence[Sequence[turn.OutputEvent]] | None) -> bytes:
        """A chunk for each answer that has something new. `events`: of each answer; None: all is text."""
        if events is None:
            parts = [self._make_one(one, None) for one in output.outputs]
        else:
            parts = [self._make_one(one, own) for one, own in zip(output.outputs, events, strict=True)]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def make_last(self) -> bytes:
        """Usage, if it was asked for, and the end."""
        if not self._has_usage or self.counter is None:
            return DONE
        chunk = msgspec.structs.replace(self._head, usage=self.counter.usage())
        return encode_event(chunk) + DONE

    def _make_one(self, output: CompletionOutput, events: Sequence[turn.OutputEvent] | None) -> bytes:
        """A chunk an event, or one of all the text. The last one says what else there is of this output."""
        index, finish = output.index, output.finish_reason
        logprobs = choose_logprobs(self._request, output, self._tokenizer)
        says_more = finish is not None or logprobs is not None or self._says_more
        if events is None and not says_more:
            return self._texts.make(index, output.text) if output.text else b""
        if events is None:
            deltas = [Delta(content=output.text)] if output.text else []
        else:
            deltas = [delta for event in events if (delta := _make_delta(event)) is not None]
            self._has_calls[index] = self._has_calls[index] or has_whole_call(events)
        if not says_more:
            return b"".join([self._deltas.make(index, delta) for delta in deltas])
        *earlier, last = deltas or [Delta()]
        choice = ChunkChoice(index, last, logprobs)
        if self._request.return_token_ids:
            choice.token_ids = output.token_ids
        if finish is not None:
            choice.finish_reason = choose_finish_reason(finish, self._has_calls[index])
            choice.stop_reason = output.stop_reason
            if self._reader.has_errors(index):
                choice.tool_parse_error = True
        choices = [*(ChunkChoice(index, delta) for delta in earlier), choice]
        return b"".join(encode_event(self._chunk([one])) for one in choices)

    def _chunk(self, choices: list[ChunkChoice]) -> ChatCompletionChunk:
        chunk = msgspec.structs.replace(self._head, choices=choices)
        if self._always_has_usage and self.counter is not None:
            chunk.usage = self.counter.usage()
        return chunk


def _make_delta(event: turn.OutputEvent) -> Delta | None:
    match event:
        case turn.TextDelta(text):
            return Delta(content=text)
        case turn.ReasoningDelta(text):
            return Delta(reasoning_content=text, reasoning=text)
        case turn.ToolCallStart(index, call_id, name):
            begun = AnswerFunction(name, "")
            return Delta(tool_calls=[DeltaToolCall(index=index, id=call_id, type="function", function=begun)])
        case turn.ToolCallDelta(index, arguments):
            more = AnswerFunction(arguments=arguments)
            return Delta(tool_calls=[DeltaToolCall(index=index, function=more)])
        case turn.ToolCallEnd():
            return None


def has_whole_call(events: Sequence[turn.OutputEvent]) -> bool:
    """Whether a call ends in them; a stop string may have cut the only one off."""
    return any(isinstance(event, turn.ToolCallEnd) for event in events)


def choose_finish_reason(reason: str | None, has_calls: bool) -> str | None:
    """A turn that ends by itself ends for its whole calls, if it has some, also for one that was named."""
    return "tool_calls" if has_calls and reason == "stop" else reason


def choose_logprobs(
    request: ChatCompletionRequest, output: CompletionOutput, tokenizer: Tokenizer
) -> ChoiceLogprobs | None:
    """Of every token of an output, markers and thoughts too, if they are to be shown."""
    if output.logprobs is None or not wants_logprobs(request):
        return None
    top = request.logprob_token_ids or request.top_logprobs or 0
    return make_chat_logprobs(output.logprobs, top, tokenizer, bool(request.return_tokens_as_token_ids))


def wants_logprobs(request: ChatCompletionRequest) -> bool:
    """Whether logprobs are to be shown."""
    return bool(request.logprobs or request.logprob_token_ids)


_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
REFUSED_OF_PROMPTS: Refused = {"chat_template": ("none: the template is the model's own", lambda _: False)}
REFUSED: Refused = (
    REFUSED_BY_ALL
    | REFUSED_OF_PROMPTS
    | {
        "return_prompt_text": ("false: /tokenize and /detokenize tell it", is_off),
        "functions": ("none: use tools", is_off),
        "function_call": ("'none' or 'auto': use tool_choice", lambda value: value in ("none", "auto")),
        "reasoning_effort": (", ".join(map(repr, _EFFORTS)), _EFFORTS.__contains__),
        "modalities": ("['text']: only text is supported", lambda value: value == ["text"]),
        "audio": ("none: only text is supported", is_off),
        "prediction": ("none: predicted outputs are not supported", is_off),
        "web_search_options": ("none: web search is not supported", lambda _: False),
        "verbosity": ("'medium': verbosity is not supported", lambda value: value == "medium"),
    }
)
ROUTES = [
    PostRoute(
        "/v1/chat/completions",
        ChatCompletionRequest,
        create_chat_completion,
        ChatCompletion,
        ChatCompletionChunk,
        task="generate",
        refused=REFUSED,
    )
]
