"""A Messages request -> the Conversation that all APIs make of theirs."""

from __future__ import annotations

from typing import Any

from ....ipc.params.structured_outputs import StructuredOutputsParams
from ...formats.offered_tools import ToolFields
from ...tools import Tool, ToolChoice
from ..bodies import messages as body
from ..bodies.schema import ChatMessage
from ..errors import FieldError
from ..serving import Serving
from .conversation import Conversation, MessageDraft
from .formats import FormatSource
from .unsupported import MESSAGES_RULES, check_supported

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


def make_conversation(serving: Serving, request: body.CountTokensRequest) -> Conversation:
    """Check what is Anthropic's own, and say the rest in the words of all. Raises FieldError."""
    check_supported(request, MESSAGES_RULES)
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
    num_blocks = sum(len(one) for one in blocks if isinstance(one, list))
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


def _find_format(request: body.CountTokensRequest) -> FormatSource | None:
    places = {
        "output_config.format": request.output_config.format if request.output_config else None,
        "output_format": request.output_format,
    }
    given = {place: one for place, one in places.items() if one is not None}
    if len(given) > 1:
        raise FieldError("output_format", "given", "none beside output_config.format")
    for place, one in given.items():
        if not one.schema:
            raise FieldError(f"{place}.schema", one.schema, "a JSON schema that is not empty")
        return FormatSource(StructuredOutputsParams(json=one.schema), f"{place}.schema")
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
