"""POST /v1/chat/completions."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Annotated, Any, ClassVar

from msgspec import Meta
from starlette.responses import Response

from ....ipc.params.param_fields import MAX_INT
from ....ipc.params.sampling_params import SamplingParams
from ... import events as turn
from ...formats.answer_reader import AnswerReader
from ...formats.offered_tools import check_num_tools, read_tool_choice
from ...outputs import CompletionOutput, RequestOutput
from ...text.tokenizer import Tokenizer
from ...tools import Tool
from ..bodies.formats import Verbosity
from ..bodies.schema import (
    KNOWN_TYPES_OF_CHATS,
    ChatMessage,
    ChoiceLogprobs,
    NumTokens,
    SamplingFields,
    TokenizeRequest,
    ToolParam,
)
from ..caller import Caller
from ..errors import FieldError
from ..limits import MAX_TOP_LOGPROBS
from ..serving import Serving, make_id
from ..stream import Json, respond
from ..text_process.jobs import Conversation
from .conversation import parse_outputs, prepare_conversation, read_output
from .formats import find_format
from .logprobs import make_beside, make_chat_logprobs, make_prompt_logprobs
from .route import REFUSED_BY_ALL, PostRoute, Refused, is_off
from .sampling import (
    check_logprob_token_ids,
    check_stream_options,
    first_given,
    make_params,
    read_beam_search,
)
from .usage import Chunks, take_last

Outputs = AsyncGenerator[RequestOutput, None]


class ChatCompletionRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    KNOWN_TYPES: ClassVar = KNOWN_TYPES_OF_CHATS
    CHOICES: ClassVar = SamplingFields.CHOICES | {"verbosity": "'low', 'medium' or 'high'"}
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
    prediction: dict[str, Any] | None = None  # a guess at the answer, which would only be faster by it
    web_search_options: dict[str, Any] | None = None
    verbosity: Verbosity | None = None  # advice, which changes nothing here
    documents: Annotated[list[dict[str, Any]], Meta(description="for the chat template")] | None = None
    return_prompt_text: bool | None = None


def _make_params(serving: Serving, request: ChatCompletionRequest) -> SamplingParams:
    """Without a limit the answer may fill what is left of the context."""
    check_logprob_token_ids(request, bool(request.logprobs), "only with logprobs=true")
    asks = request.logprobs and not request.logprob_token_ids  # which go before the likeliest
    logprob_fields = {"logprobs": request.top_logprobs or 0} if asks else {}
    max_tokens = first_given(request.max_completion_tokens, request.max_tokens)
    return make_params(serving, request, max_tokens, **logprob_fields)


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
    chunks = ChatChunks(serving, request, request_id, echoed, reader)
    if request.stream:
        return serving.stream(_stream(serving, outputs, chunks, params.n, reader), request_id)
    parsed = await take_last(parse_outputs(serving, outputs, reader))
    return respond(await make_beside(parsed[0], lambda: chunks.complete(*parsed)), request_id)


def _check(serving: Serving, request: ChatCompletionRequest) -> None:
    if request.reasoning_effort not in (None, "none") and not serving.is_thinking:
        raise FieldError("reasoning_effort", request.reasoning_effort, "'none': this model does not think")
    if request.top_logprobs and not request.logprobs:
        raise FieldError("top_logprobs", request.top_logprobs, "only with logprobs=true")
    check_stream_options(request)
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


async def _stream(
    serving: Serving, outputs: Outputs, chunks: ChatChunks, n: int, reader: AnswerReader
) -> AsyncGenerator[bytes, None]:
    is_first = True
    async with aclosing(outputs):
        async for output in outputs:
            events = None if reader.is_plain else await read_output(serving, output, reader)
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
    offered = request.tools or ()
    check_num_tools(len(offered))
    continues = bool(request.continue_final_message)
    adds = request.add_generation_prompt
    return Conversation(
        messages=request.messages or [],
        tools=[make_tool(number, tool) for number, tool in enumerate(offered)],
        variables=request.chat_template_kwargs,
        add_generation_prompt=not continues if adds is None else adds,
        continue_final_message=continues,
        add_special_tokens=bool(request.add_special_tokens),
    )


def make_tool(number: int, param: ToolParam) -> Tool:
    """A tool of a chat, the entry `number` of them. Raises FieldError."""
    if param.type != "function":
        raise FieldError(f"tools[{number}].type", param.type, "'function'")
    function = param.function
    return Tool(function.name, function.description, function.parameters, bool(function.strict))


class ChatChunks(Chunks):
    """The answer to a chat, whole or in the chunks of a stream."""

    def __init__(
        self,
        serving: Serving,
        request: ChatCompletionRequest,
        request_id: str,
        echoed: str,
        reader: AnswerReader,
    ) -> None:
        """`echoed`: what each answer begins with. `reader`: knows which calls could not be read."""
        kind = "chat.completion.chunk" if request.stream else "chat.completion"
        model = serving.find_name(request.model)
        super().__init__(kind, request_id, model, request.stream_options, serving.options)
        self._request, self._echoed = request, echoed
        self._reader, self._tokenizer = reader, serving.tokenizer
        self._says_more = self.always_has_usage or bool(request.return_token_ids)  # in each chunk
        self.has_logprobs = wants_logprobs(request)
        after = b',"logprobs":null,"finish_reason":null'
        self._texts = self.make_template(b'"delta":{"content":', b"}" + after)
        self._deltas = self.make_template(b'"delta":', after)
        self._has_calls: defaultdict[int, bool] = defaultdict(bool)  # by answer

    def make_roles(self, n: int, output: RequestOutput) -> bytes:
        """The first chunk of each answer says whose it is; made once."""
        echoed, self._echoed = self._echoed, ""
        delta = {"role": "assistant", "content": echoed}
        choices = [_make_choice(index, delta=delta) for index in range(n)]
        more: Json = {}
        if output.prompt_logprobs is not None:
            more["prompt_logprobs"] = make_prompt_logprobs(output.prompt_logprobs)
        if self._request.return_token_ids:
            more["prompt_token_ids"] = output.prompt_token_ids
        return self.make_chunk(choices, **more)

    def make(self, output: RequestOutput, events: Sequence[Sequence[turn.OutputEvent]] | None) -> bytes:
        """A chunk for each answer that has something new. `events`: of each answer; None: all is text."""
        if self.has_usage:
            self._count(output)
        if events is None:
            parts = [self._make_one(completion, None) for completion in output.outputs]
        else:
            parts = [
                self._make_one(completion, completion_events)
                for completion, completion_events in zip(output.outputs, events, strict=True)
            ]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def complete(self, output: RequestOutput, events: Sequence[Sequence[turn.OutputEvent]]) -> Json:
        """The whole answer, of its only output and the events of each choice."""
        self._count(output)
        choices = [
            self._make_whole(completion, completion_events)
            for completion, completion_events in zip(output.outputs, events, strict=True)
        ]
        positions = output.prompt_logprobs
        return self.make_whole(
            choices,
            prompt_logprobs=None if positions is None else make_prompt_logprobs(positions),
            prompt_token_ids=output.prompt_token_ids if self._request.return_token_ids else None,
        )

    def _count(self, output: RequestOutput) -> None:
        self.counter.add(output)
        self.counter.num_reasoning_tokens = self._reader.num_reasoning_tokens

    def _make_one(self, output: CompletionOutput, events: Sequence[turn.OutputEvent] | None) -> bytes:
        """A chunk an event, or one of all the text. The last one says what else there is of this output."""
        index, finish = output.index, output.finish_reason
        logprobs = choose_logprobs(self._request, output, self._tokenizer)
        says_more = finish is not None or logprobs is not None or self._says_more
        if events is None and not says_more:
            return self._texts.make(index, output.text) if output.text else b""
        if events is None:
            deltas: list[Json] = [{"content": output.text}] if output.text else []
        else:
            deltas = [delta for event in events if (delta := _make_delta(event)) is not None]
            self._has_calls[index] = self._has_calls[index] or has_whole_call(events)
        if not says_more:
            return b"".join([self._deltas.make(index, delta) for delta in deltas])
        *earlier, last = deltas or [{}]
        choice = _make_choice(index, delta=last) | {"logprobs": logprobs}
        if self._request.return_token_ids:
            choice["token_ids"] = output.token_ids
        if finish is not None:
            choice |= self._describe_end(output, self._has_calls[index])
        choices = [*(_make_choice(index, delta=delta) for delta in earlier), choice]
        return b"".join(self.make_chunk([each]) for each in choices)

    def _make_whole(self, completion: CompletionOutput, events: Sequence[turn.OutputEvent]) -> Json:
        parsed = turn.AssistantMessage()
        for event in events:
            parsed.add(event)
        message: Json = {"role": "assistant", "content": self._echoed + parsed.content, "refusal": None}
        if parsed.reasoning:
            message |= _tell_thoughts(parsed.reasoning)
        if parsed.tool_calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = [
                _tell_call(call.call_id, call.name, call.arguments) for call in parsed.tool_calls
            ]
        choice = _make_choice(completion.index, message=message)
        choice["logprobs"] = choose_logprobs(self._request, completion, self._tokenizer)
        choice["token_ids"] = completion.token_ids if self._request.return_token_ids else None
        return choice | self._describe_end(completion, has_whole_call(events))

    def _describe_end(self, completion: CompletionOutput, has_calls: bool) -> Json:
        reason = choose_finish_reason(completion.finish_reason, has_calls)
        end: Json = {"finish_reason": reason, "stop_reason": completion.stop_reason}
        if self._reader.has_errors(completion.index):  # a call could not be read and stays in the content
            end["tool_parse_error"] = True
        return end


def _make_choice(index: int, **fields: Json) -> Json:
    """An answer, or what is new of it."""
    return {"index": index, **fields, "logprobs": None, "finish_reason": None}


def _tell_thoughts(text: str) -> Json:
    """By both of the names that clients read."""
    return {"reasoning_content": text, "reasoning": text}


def _tell_call(call_id: str, name: str, arguments: str) -> Json:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _make_delta(event: turn.OutputEvent) -> Json | None:
    match event:
        case turn.TextDelta(text):
            return {"content": text}
        case turn.ReasoningDelta(text):
            return _tell_thoughts(text)
        case turn.ToolCallStart(index, call_id, name):
            return {"tool_calls": [{"index": index, **_tell_call(call_id, name, "")}]}
        case turn.ToolCallDelta(index, arguments):
            return {"tool_calls": [{"index": index, "function": {"arguments": arguments}}]}
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
    return bool(request.logprobs)


_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
REFUSED_OF_PROMPTS: Refused = {"chat_template": ("none: the template is the model's own", is_off)}
REFUSED: Refused = (
    REFUSED_BY_ALL
    | REFUSED_OF_PROMPTS
    | {
        "return_prompt_text": ("false: /tokenize and /detokenize tell it", is_off),
        "functions": ("none: use tools", is_off),
        "function_call": ("'none' or 'auto': use tool_choice", lambda value: value in ("none", "auto")),
        "reasoning_effort": (", ".join(map(repr, _EFFORTS)), _EFFORTS.__contains__),
        "modalities": ("['text']: only text is supported", lambda value: value in ([], ["text"])),
        "audio": ("none: only text is supported", is_off),
        "web_search_options": ("none: web search is not supported", lambda _: False),
    }
)
ROUTES = [
    PostRoute("/v1/chat/completions", ChatCompletionRequest, create_chat_completion, "generate", REFUSED)
]
