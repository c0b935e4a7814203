"""Bodies of /v1/responses: the request, and the items of a conversation."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, get_args

import msgspec
from msgspec import Meta

from ...formats.offered_tools import MAX_NAME_LENGTH
from ..bodies.formats import ResponsesText
from ..bodies.schema import KNOWN_TYPES_OF_TOOLS, TEXT_TYPES, Metadata, NumTokens, SharedFields, TextPart
from ..limits import MAX_TOP_LOGPROBS

ItemId = Annotated[str, Meta(max_length=256)]  # answers repeat them
_ONLY_TEXT = "'input_text': only text is supported"
Status = Literal["in_progress", "completed", "incomplete"]


class _Item(msgspec.Struct, tag_field="type", kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """An item of a conversation; `type` says which kind."""

    id: ItemId | None = None
    status: Status | None = None


class MessageItem(_Item, tag="message"):
    """What somebody says. phase: OpenAI's word for what an assistant's message is; it changes nothing."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[TextPart]
    phase: str | None = None


class ReasoningItem(_Item, tag="reasoning"):
    """The assistant's thoughts. encrypted_content: another server's, which only that one can read."""

    content: list[TextPart] | None = None
    summary: list[TextPart] = []
    encrypted_content: str | None = None


class FunctionCallItem(_Item, tag="function_call"):
    """The assistant calls a tool. arguments: a JSON object's text. namespace: that of the tool."""

    call_id: ItemId
    name: str
    arguments: str
    namespace: str | None = None


class FunctionCallOutputItem(_Item, tag="function_call_output"):
    """What a tool has answered. Which one it was is known by the call."""

    call_id: ItemId
    output: str | list[TextPart]
    name: str | None = None
    namespace: str | None = None


class ItemReference(_Item, tag="item_reference"):
    """An item of a stored response, by its id."""


ConversationItem = MessageItem | ReasoningItem | FunctionCallItem | FunctionCallOutputItem
InputItem = ConversationItem | ItemReference


def _refer(*kinds: type[msgspec.Struct], **other: Any) -> Meta:
    """For /openapi.json: what an object is, where msgspec is told that it may be any. `other`: one more."""
    refs = [{"$ref": f"#/components/schemas/{kind.__name__}"} for kind in kinds]
    return Meta(extra_json_schema={"anyOf": [*refs, other] if other else refs})


# A message may leave its type out.
_UNTYPED: dict[str, Any] = {"type": "object", "required": ["role", "content"], "not": {"required": ["type"]}}


class InputItems(msgspec.Struct):
    """The field that has the items, so that what is wrong with one is told with its place."""

    KNOWN_TYPES: ClassVar = {
        "input[].content[]": ((*TEXT_TYPES, "reasoning_text"), _ONLY_TEXT),
        "input[].output[]": (TEXT_TYPES, _ONLY_TEXT),
    }
    input: list[InputItem]


class _Tool(msgspec.Struct, tag_field="type", kw_only=True, forbid_unknown_fields=True):
    """A tool; `type` says of which kind."""


class FunctionTool(_Tool, tag="function", kw_only=True):
    """A function that the model may call; its client runs it."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamespaceTool(_Tool, tag="namespace", kw_only=True):
    """Functions under a name that they share, which calls repeat."""

    name: Annotated[str, Meta(max_length=MAX_NAME_LENGTH)]  # each of the functions is given it
    description: str | None = None
    tools: list[FunctionTool]


class WebSearchTool(msgspec.Struct, tag_field="type", tag="web_search"):
    """A tool of OpenAI's servers, which is left out unless a call is required."""


OfferedTool = FunctionTool | NamespaceTool


class OfferedTools(msgspec.Struct):
    """As InputItems."""

    KNOWN_TYPES: ClassVar = KNOWN_TYPES_OF_TOOLS
    tools: list[OfferedTool | WebSearchTool]


class Reasoning(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How much to think. Summaries may be asked for: the thoughts themselves are given instead."""

    effort: str | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class ResponsesRequest(SharedFields, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/responses. input: a text, or items as InputItems has them; tools: as OfferedTools has them.

    Both are checked in a second step, so that a kind that is not supported is refused by its name.
    """

    CHOICES: ClassVar = {
        "text.format.type": "text, json_object or json_schema",
        "text.verbosity": "'low', 'medium' or 'high'",
        "reasoning.context": "'auto': the template chooses which earlier thoughts are shown",
        "reasoning.mode": "'standard'",
    }
    CHECKED_LATER: ClassVar = (*get_args(InputItem), FunctionTool, NamespaceTool)
    input: str | list[Annotated[dict[str, Any], _refer(*get_args(InputItem), **_UNTYPED)]]
    instructions: str | None = None
    metadata: Metadata | None = None
    max_output_tokens: NumTokens | None = None
    top_logprobs: Annotated[int, Meta(ge=-1, le=MAX_TOP_LOGPROBS)] | None = None
    text: ResponsesText | None = None
    previous_response_id: ItemId | None = None
    conversation: Any = None
    prompt: dict[str, Any] | None = None
    tools: list[Annotated[dict[str, Any], _refer(FunctionTool, NamespaceTool)]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Annotated[int, Meta(ge=1)] | None = None
    reasoning: Reasoning | None = None
    background: bool | None = None
    truncation: str | None = None
    include: list[str] | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_response_messages: bool | None = None
    previous_input_messages: list[Any] | None = None
