"""POST /v1/messages and /v1/messages/count_tokens, for Anthropic's clients.

A turn is told as blocks: events of a stream, or the blocks that these add up to.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import Any

from starlette.responses import Response

from ....ipc.errors import SamplingParamsError
from ....ipc.params.sampling_params import SamplingParams
from ....ipc.params.structured_outputs import StructuredOutputsParams
from ... import events as turn
from ...formats.answer_reader import AnswerReader
from ...formats.offered_tools import ToolFields
from ...outputs import CompletionOutput, RequestOutput
from ...tools import Tool, ToolChoice
from ..bodies.schema import ChatMessage
from ..caller import Caller
from ..errors import MESSAGES_PATH, ApiError, FieldError, as_api_error, encode_messages_error
from ..serving import Serving
from ..stream import Json, encode_named_event, respond
from ..text_process.jobs import Conversation, GrammarJob, TokenizeJob
from . import messages_body as body
from .conversation import MessageDraft, ParsedOutputs, check_source, parse_outputs, prepare_conversation
from .prompts import answer_by_text
from .route import PostRoute, Refused, is_off
from .sampling import make_params
from .tool_input import NO_INPUT, ToolInput, read_input
from .usage import UsageCounter

# A Messages request -> the Conversation that all APIs make of theirs.

_FIELDS = ToolFields(name="name", schema="input_schema")
# Claude Code's first system text has a hash that differs each time: no prefix would be found in the cache.
_BILLING_HEADER = "x-anthropic-billing-header"
_EFFORTS = {"xhigh": "high", "max": "high"}  # templates know no more than OpenAI's
_ROLES: dict[type[body.BlockParam], str] = {
    body.ThinkingBlockParam: "assistant",
    body.RedactedThinkingBlockParam: "assistant",
    body.ToolUseBlockParam: "assistant",
    body.ToolResultBlockParam: "user",
}


def _make_params(serving: Serving, request: body.MessagesRequest) -> SamplingParams:
    """As a chat's, with the fewer fields that /v1/messages has."""
    try:
        return make_params(serving, request, request.max_tokens, stop=request.stop_sequences or [])
    except SamplingParamsError as error:
        name = "stop_sequences" if error.field == "stop" else error.field
        raise SamplingParamsError(name, error.value, error.allowed) from None


def make_conversation(serving: Serving, request: body.CountTokensRequest) -> Conversation:
    """Check what is Anthropic's own, and say the rest in the words of all. Raises FieldError."""
    _check_size(request, serving.options.limits.max_messages)
    messages = _make_messages(request)
    continues = messages[-1].role == "assistant"
    if continues and messages[-1].tool_calls:
        raise FieldError("messages", "a tool_use at the end", "a tool_result behind each tool_use")
    conversation = Conversation(
        messages=messages,
        tools=[_make_tool(tool) for tool in request.tools or ()],
        choice=_make_choice(request),
        parallel=not (request.tool_choice and request.tool_choice.disable_parallel_tool_use),
        format=_find_format(request),
        add_generation_prompt=not continues,
        continue_final_message=continues,
        fields=_FIELDS,
    )
    _set_thinking(conversation, request)
    if not serving.is_thinking:  # a model that writes no thoughts keeps within every budget
        conversation.thinking_token_budget = None
    return conversation


def _set_thinking(conversation: Conversation, request: body.CountTokensRequest) -> None:
    thinking = request.thinking
    if request.output_config is not None and (effort := request.output_config.effort) is not None:
        conversation.reasoning_effort = _EFFORTS.get(effort, effort)
    if thinking is not None:
        conversation.variables = {"enable_thinking": not isinstance(thinking, body.ThinkingDisabled)}
    if isinstance(thinking, body.ThinkingEnabled):
        conversation.thinking_token_budget = thinking.budget_tokens


def _check_size(request: body.CountTokensRequest, max_messages: int) -> None:
    blocks = [request.system or (), *(message.content for message in request.messages)]
    num_blocks = sum(len(content) for content in blocks if isinstance(content, list))
    if num_blocks > max_messages:
        allowed = f"at most {max_messages} in all messages (max_messages)"
        raise FieldError("messages.content", f"{num_blocks} blocks", allowed)


def _make_tool(tool: body.MessagesTool) -> Tool:
    return Tool(tool.name, tool.description, tool.input_schema, bool(tool.strict))


def _make_choice(request: body.CountTokensRequest) -> ToolChoice:
    match request.tool_choice:
        case body.ToolChoiceNone():
            return ToolChoice("none")
        case body.ToolChoiceTool(name=name):
            return ToolChoice("required", frozenset([name]))
        case body.ToolChoiceAny():
            if not request.tools:
                raise FieldError("tool_choice.type", "any", "'auto' or 'none' without tools")
            return ToolChoice("required")
        case _:
            return ToolChoice()


def _find_format(request: body.CountTokensRequest) -> GrammarJob | None:
    places = {
        "output_config.format": request.output_config.format if request.output_config else None,
        "output_format": request.output_format,
    }
    formats = {place: output_format for place, output_format in places.items() if output_format is not None}
    if len(formats) > 1:
        raise FieldError("output_format", "given", "none beside output_config.format")
    for place, output_format in formats.items():
        if not output_format.schema:
            raise FieldError(f"{place}.schema", output_format.schema, "a JSON schema that is not empty")
        return GrammarJob(params=StructuredOutputsParams(json=output_format.schema), place=f"{place}.schema")
    return None


def _make_messages(request: body.CountTokensRequest) -> list[ChatMessage]:
    turns = _Turns()
    if system := _read_system(request.system):
        turns.drafts.append(MessageDraft("system", [system]))
    for place, message in enumerate(request.messages):
        turns.take(f"messages[{place}]", message)
    return [draft.finish() for draft in turns.drafts]


def _read_system(system: str | list[body.TextBlockParam] | None) -> str:
    if system is None or isinstance(system, str):
        return system or ""
    return "\n".join(block.text for block in system if not block.text.startswith(_BILLING_HEADER))


class _Turns:
    """Messages as templates take them: results of tools are messages, and a speaker has one turn in a row."""

    def __init__(self) -> None:
        self.drafts: list[MessageDraft] = []
        self._known_calls: set[str] = set()

    def take(self, place: str, message: body.MessageParam) -> None:
        """The results in a message come first, in their order, and then what else it says."""
        content = message.content
        blocks: list[body.BlockParam] = (
            [body.TextBlockParam(text=content)] if isinstance(content, str) else content
        )
        others: list[body.BlockParam] = []
        for number, block in enumerate(blocks):
            _check_role(f"{place}.content[{number}].type", block, message.role)
            if isinstance(block, body.ToolResultBlockParam):
                self._take_result(f"{place}.content[{number}]", block)
            else:
                others.append(block)
        if message.role == "system":
            self._take_system([block.text for block in others if isinstance(block, body.TextBlockParam)])
        elif others or not blocks:
            draft = self._open(message.role)
            for block in others:
                match block:
                    case body.TextBlockParam(text=text):
                        draft.texts.append(text)
                    case body.ThinkingBlockParam(thinking=thinking):
                        draft.thoughts.append(thinking)
                    case body.ToolUseBlockParam(id=call_id, name=name, input=arguments):
                        draft.add_call(call_id, name, arguments)
                        self._known_calls.add(call_id)
                    case _:
                        pass

    def _take_system(self, texts: list[str]) -> None:
        """What begins the conversation is more of the system's text.

        Many templates refuse a system's message in the middle, and many models were never trained with one:
        it is told as Claude Code does where it knows a model to be such.
        """
        if not self.drafts or self.drafts[-1].role == "system":
            self._open("system").texts += texts
        else:
            self._open("user").texts += ["<system-reminder>", *texts, "</system-reminder>"]

    def _open(self, role: str) -> MessageDraft:
        if not self.drafts or self.drafts[-1].role != role:
            self.drafts.append(MessageDraft(role))
        return self.drafts[-1]

    def _take_result(self, place: str, block: body.ToolResultBlockParam) -> None:
        if block.tool_use_id not in self._known_calls:
            raise FieldError(f"{place}.tool_use_id", block.tool_use_id, "the id of a tool_use before it")
        content = block.content
        texts = [part.text for part in content] if isinstance(content, list) else [content or ""]
        if block.is_error:
            texts[:1] = [f"Error: {text}" for text in texts[:1] or [""]]
        self.drafts.append(MessageDraft("tool", texts, call_id=block.tool_use_id))


def _check_role(place: str, block: body.BlockParam, role: str) -> None:
    owner = _ROLES.get(type(block), role)
    if role != owner:
        kind: Any = type(block).__struct_config__.tag
        raise FieldError(place, kind, f"a block that a message of the {role} may have; it is the {owner}'s")


_BUDGET = "thinking.budget_tokens"
# Clients hand thoughts back with their signature, and may refuse those without one. Nobody checks ours.
SIGNATURE = "quire"
# By kind of block: what it begins with, and the kind of its deltas and their field.
_BLOCKS: dict[str, tuple[Json, str, str]] = {
    "text": ({"text": "", "citations": None}, "text_delta", "text"),
    "thinking": ({"thinking": "", "signature": ""}, "thinking_delta", "thinking"),
    "tool_use": ({"input": NO_INPUT}, "input_json_delta", "partial_json"),
}


class BlockWriter:
    """Output events, in their order -> events of blocks, of which one is open at a time.

    shows_thinking: thoughts are told, and not only that there were some.
    """

    def __init__(self, shows_thinking: bool = True) -> None:
        self.has_called = False  # a call is complete
        self._shows_thinking = shows_thinking
        self._index = 0  # of the open block, or the next
        self._open = ""  # the kind of the block that is open
        self._input: ToolInput | None = None  # of the call that is being told
        self._blank = ""  # white space that no block has: before a call nobody wants it

    def take(self, event: turn.OutputEvent) -> list[Json]:
        """What is to be said of the turn's next event."""
        match event:
            case turn.TextDelta(text):
                return self._take_text(text)
            case turn.ReasoningDelta(text):
                events = [] if self._open == "thinking" else self._begin("thinking")
                return events + self._tell(text if self._shows_thinking else "")
            case turn.ToolCallStart(_, call_id, name):
                events = self._begin("tool_use", id=call_id, name=name)
                self._input = ToolInput()
                return events
            case turn.ToolCallDelta(_, arguments):
                return self._tell(self._input.take(arguments) if self._input else "")
            case turn.ToolCallEnd():
                self.has_called = True
                events = self._tell(self._input.end() if self._input else "")
                self._input = None
                return events + self._stop()

    def end(self) -> list[Json]:
        """The turn has ended, in whatever block."""
        if self._index == 0 and not self._open and (blank := self._blank):
            return self._begin("text") + self._tell(blank) + self._stop()
        return self._stop()

    def _take_text(self, text: str) -> list[Json]:
        if self._open == "text":
            return self._tell(text)
        text = self._blank + text
        if not text.strip():
            self._blank = text
            return []
        return self._begin("text") + self._tell(text)

    def _begin(self, kind: str, **named: str) -> list[Json]:
        events = self._stop()
        self._open, self._blank = kind, ""
        block = {"type": kind, **named, **_BLOCKS[kind][0]}
        return [*events, {"type": "content_block_start", "index": self._index, "content_block": block}]

    def _stop(self) -> list[Json]:
        if not self._open:
            return []
        events: list[Json] = []
        if self._input is not None:  # the call was cut
            events = self._tell(self._input.close())
            self._input = None
        if self._open == "thinking":
            events = [self._delta("signature_delta", "signature", SIGNATURE)]
        events.append({"type": "content_block_stop", "index": self._index})
        self._open = ""
        self._index += 1
        return events

    def _tell(self, text: str) -> list[Json]:
        """More of the open block."""
        return [self._delta(*_BLOCKS[self._open][1:], text)] if text else []

    def _delta(self, kind: str, field: str, text: str) -> Json:
        return {"type": "content_block_delta", "index": self._index, "delta": {"type": kind, field: text}}


def collect_blocks(events: Iterable[Json]) -> list[Json]:
    """The blocks of a whole answer: what its events add up to."""
    blocks: list[Json] = []
    texts: list[str] = []
    for event in events:
        match event:
            case {"type": "content_block_start", "content_block": block}:
                texts = []
                blocks.append(dict(block))
            case {"delta": {"type": "signature_delta", "signature": signature}}:
                blocks[-1]["signature"] = signature
            case {"type": "content_block_delta", "delta": {"type": _, **fragment}}:
                texts += fragment.values()
            case {"type": "content_block_stop"}:
                text, kind = "".join(texts), blocks[-1]["type"]
                blocks[-1] |= {"input": read_input(text)} if kind == "tool_use" else {kind: text}
            case _:
                pass
    return blocks


async def create_message(serving: Serving, request: body.MessagesRequest, caller: Caller) -> Response:
    """Answer a conversation for Anthropic's clients. Raises InputErrors and ApiErrors before it generates."""
    thinking = request.thinking
    if isinstance(thinking, body.ThinkingEnabled) and thinking.budget_tokens >= request.max_tokens:
        allowed = f"less than max_tokens={request.max_tokens}"
        raise FieldError(_BUDGET, thinking.budget_tokens, allowed)
    params = _make_params(serving, request)
    serving.check_room(params, caller)
    try:  # the conversation is held by nobody while the answer is generated
        prompt, prepared, reader = await prepare_conversation(
            serving, caller, params, make_conversation(serving, request)
        )
    except ApiError as error:
        raise _rename(error) from None
    shows_thinking = getattr(thinking, "display", None) != "omitted"
    answer = _Answer(serving.find_name(request.model), reader, shows_thinking)
    outputs = serving.generate(answer.id, prompt, prepared, caller, request)
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
    source = check_source(serving, make_conversation(serving, request))
    job = TokenizeJob(source=source, max_model_len=serving.llm.facts.max_model_len, only_counts=True)
    return await answer_by_text(serving, job, caller)


class _Answer:
    """One message while it comes into being."""

    def __init__(self, model: str, reader: AnswerReader, shows_thinking: bool) -> None:
        self.id = f"msg_{uuid.uuid4().hex}"
        self._model = model
        self._reader = reader
        self._counter = UsageCounter()
        self._writer = BlockWriter(shows_thinking)

    async def complete(self, outputs: ParsedOutputs) -> Json:
        """The whole message."""
        api_events: list[Json] = []
        async with aclosing(outputs):
            async for output, answers in outputs:
                api_events += self._take(output, answers[0])
        return self._make_message(api_events)

    async def stream(self, outputs: ParsedOutputs) -> AsyncGenerator[bytes, None]:
        """The events of a stream, in Anthropic's order."""
        has_begun = False
        async with aclosing(outputs):
            async for output, answers in outputs:
                api_events = self._take(output, answers[0])
                if not has_begun:
                    has_begun = True
                    begun = {"type": "message_start", "message": self._make_message([])}
                    api_events = [begun, {"type": "ping"}, *api_events]
                if api_events:
                    yield b"".join(map(encode_named_event, api_events))

    def encode_failure(self, error: Exception) -> bytes:
        """The event that ends a stream in which something went wrong."""
        return b"event: error\ndata: %b\n\n" % encode_messages_error(as_api_error(error), self.id)

    def _take(self, output: RequestOutput, events: Sequence[turn.OutputEvent]) -> list[Json]:
        self._counter.add(output)
        api_events = [api_event for event in events for api_event in self._writer.take(event)]
        if output.finished:
            end = self._make_end(output.outputs[0])
            api_events += self._writer.end()
            api_events += [{"type": "message_delta", "delta": end, "usage": self._make_usage()}]
            api_events += [{"type": "message_stop"}]
        return api_events

    def _make_message(self, api_events: list[Json]) -> Json:
        message: Json = {"id": self.id, "type": "message", "role": "assistant", "model": self._model}
        message |= {"content": collect_blocks(api_events), "stop_reason": None, "stop_sequence": None}
        for event in api_events:
            if event["type"] == "message_delta":
                message |= event["delta"]
        return message | {"usage": self._make_usage()}

    def _make_end(self, completion: CompletionOutput) -> Json:
        reason, sequence = _choose_stop_reason(completion, self._writer.has_called)
        end = {"stop_reason": reason, "stop_sequence": sequence}
        return end | ({"tool_parse_error": True} if self._reader.num_errors else {})

    def _make_usage(self) -> Json:
        usage = self._counter.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "output_tokens": usage["completion_tokens"],
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens_details": {"thinking_tokens": self._reader.num_reasoning_tokens or 0},
        }


def _choose_stop_reason(completion: CompletionOutput, has_called: bool) -> tuple[str, str | None]:
    """Why a turn has ended, and the stop sequence if that was it."""
    match completion.finish_reason:
        case "length":
            return "max_tokens", None
        case "abort":
            return "pause_turn", None
        case _ if has_called:
            return "tool_use", None
        case _ if isinstance(completion.stop_reason, str):
            return "stop_sequence", completion.stop_reason
        case _:
            return "end_turn", None


def _keeps_messages(value: Any) -> bool:
    """Whether a context_management leaves out thoughts only: which are shown is the template's to say."""
    return all(str(edit.get("type")).startswith("clear_thinking_") for edit in value.edits or ())


_REFUSED: Refused = {
    "context_management": ("clear_thinking edits only: nothing else is left out", _keeps_messages),
    "compaction": ("none: conversations are not summarized", is_off),
    "container": ("none: no code is run", is_off),
    "mcp_servers": ("none: only the caller runs tools", is_off),
    "thread": ("none: conversations are not stored", is_off),
}
ROUTES = [
    PostRoute(MESSAGES_PATH, body.MessagesRequest, create_message, "generate", _REFUSED),
    PostRoute(
        f"{MESSAGES_PATH}/count_tokens", body.CountTokensRequest, count_message_tokens, refused=_REFUSED
    ),
]
