"""Bodies of /v1/messages and /v1/messages/count_tokens as Anthropic's clients send them.

As in bodies/schema.py a field that is not here is refused. Of those that are, `messages.py` refuses
what asks for something that Quire does not have; cache_control does not, since prefixes are cached anyway.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from ....ipc.params.param_fields import MAX_INT
from ....ipc.params.sampling_params import Seed, Stops, TopP
from ....ipc.protocol.rights import CALLER_OPTIONS
from ..bodies.schema import declare

CacheControl = dict[str, Any]


class _Tagged(msgspec.Struct, tag_field="type", kw_only=True, forbid_unknown_fields=True):
    """One of several kinds, which `type` names."""


class TextBlockParam(_Tagged, tag="text"):
    """A text."""

    text: str
    cache_control: CacheControl | None = None
    citations: Any = None
    parsed_output: Any = None  # clients add it to what they were answered


class ThinkingBlockParam(_Tagged, tag="thinking"):
    """Thoughts of an earlier turn. Nothing depends on the signature."""

    thinking: str
    signature: str | None = None
    cache_control: CacheControl | None = None


class RedactedThinkingBlockParam(_Tagged, tag="redacted_thinking"):
    """Thoughts that another server keeps to itself; the model does not see them."""

    data: str
    cache_control: CacheControl | None = None


class ToolUseBlockParam(_Tagged, tag="tool_use"):
    """A call of an earlier turn."""

    id: str
    name: str
    input: dict[str, Any]
    caller: dict[str, Any] | None = None
    toolset_name: None = None
    cache_control: CacheControl | None = None


class ToolResultBlockParam(_Tagged, tag="tool_result"):
    """What a call of the turn before has given."""

    tool_use_id: str
    content: str | list[TextBlockParam] | None = None
    is_error: bool | None = None
    toolset_name: None = None
    cache_control: CacheControl | None = None


BlockParam = (
    TextBlockParam
    | ThinkingBlockParam
    | RedactedThinkingBlockParam
    | ToolUseBlockParam
    | ToolResultBlockParam
)


class MessageParam(msgspec.Struct, forbid_unknown_fields=True):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[BlockParam]


class MessagesTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool that the caller runs; tools that a server would run are refused."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl | None = None
    input_examples: list[dict[str, Any]] | None = None
    # Arguments are sent as they are generated in any case.
    eager_input_streaming: bool | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None


class _CallingChoice(_Tagged):
    disable_parallel_tool_use: bool | None = None


class ToolChoiceAuto(_CallingChoice, tag="auto"):
    """Calls as the model likes."""


class ToolChoiceAny(_CallingChoice, tag="any"):
    """At least one call."""


class ToolChoiceTool(_CallingChoice, tag="tool", kw_only=True):
    """A call of this tool."""

    name: str


class ToolChoiceNone(_CallingChoice, tag="none"):
    """No call."""


ToolChoiceParam = ToolChoiceAuto | ToolChoiceAny | ToolChoiceTool | ToolChoiceNone

Display = Literal["summarized", "omitted"]


class ThinkingEnabled(_Tagged, tag="enabled"):
    """At most so many tokens of thoughts. display: "omitted" sends none of them."""

    budget_tokens: Annotated[int, Meta(ge=1024, le=MAX_INT)]
    display: Display | None = None


class ThinkingAdaptive(_Tagged, tag="adaptive"):
    """Thoughts as the model likes."""

    display: Display | None = None


class ThinkingDisabled(_Tagged, tag="disabled"):
    """No thoughts."""


ThinkingParam = ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled


class JsonOutputFormat(_Tagged, tag="json_schema"):
    """JSON that satisfies a schema."""

    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    """How an answer has to look, and how much the model is to think about it."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonOutputFormat | None = None


class ContextManagement(msgspec.Struct, forbid_unknown_fields=True):
    """What of a long conversation the server would leave out."""

    edits: list[dict[str, Any]] | None = None


# The kinds there are, by the field that says which it is.
_CHOICES = {
    "messages[].role": "user, assistant or system",
    "messages[].content[].type": "text, thinking, redacted_thinking, tool_use or tool_result: "
    "only text is read, and only the caller runs tools",
    "messages[].content[].content[].type": "text: only text is read",
    "system[].type": "text",
    "tools[].type": "custom, or none: only the caller runs tools",
    "tools[].allowed_callers[]": "direct: only the model calls",
    "tools[].defer_loading": "false: there is no search for tools",
    "tool_choice.type": "auto, any, tool or none",
    "thinking.type": "enabled, adaptive or disabled",
    "thinking.display": "summarized or omitted",
    "output_config.effort": "low, medium, high, xhigh or max",
    "output_config.format.type": "json_schema",
    "output_format.type": "json_schema",
}


class CountTokensRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages/count_tokens."""

    CHOICES: ClassVar = _CHOICES
    model: str
    messages: Annotated[list[MessageParam], Meta(min_length=1)]
    system: str | list[TextBlockParam] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: ToolChoiceParam | None = None
    thinking: ThinkingParam | None = None
    output_config: OutputConfig | None = None
    output_format: JsonOutputFormat | None = None  # as older clients say output_config.format
    context_management: ContextManagement | None = None
    compaction: dict[str, Any] | None = None
    container: Any = None
    mcp_servers: list[Any] | None = None
    thread: dict[str, Any] | None = None
    # These say nothing about the answer.
    cache_control: CacheControl | None = None
    betas: list[str] | None = None
    speed: str | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None


_Scheduled = declare("_Scheduled", CountTokensRequest, CALLER_OPTIONS)


class MessagesRequest(_Scheduled, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Meta(ge=1, le=MAX_INT)]
    stream: bool | None = None
    stop_sequences: Stops | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Meta(ge=0, le=MAX_INT)] | None = None
    seed: Seed | None = None
    # These say nothing about the answer.
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    inference_geo: str | None = None
    diagnostics: dict[str, Any] | None = None
    billing_policy: Any = None
    fallbacks: Any = None
    fallback_credit_token: Any = None
