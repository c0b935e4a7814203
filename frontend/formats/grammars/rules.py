"""OutputRules: what of a turn is enforced beside the answer's own format: who may be called, with what, and
how long the model thinks. Plain data, which goes to where grammars are compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from ....ipc.protocol.messages import Purpose
from ...tools import Tool, ToolChoice
from ..offered_tools import CHAT_FIELDS, ToolFields
from ..output_format import OutputFormat


class ToolRule(msgspec.Struct, frozen=True):
    """A tool that may be called.

    parameters: the schema that its arguments have to satisfy, None for any JSON object. place: what the
    schema is called in errors. takes_arguments False: its arguments are {}. is_strict: a schema that cannot
    be followed is refused; else it is left out.
    """

    name: str
    parameters: dict[str, Any] | None = None
    place: str = ""
    takes_arguments: bool = True
    is_strict: bool = False


class OutputRules(msgspec.Struct, frozen=True, kw_only=True):
    """How a turn is written, and what it may hold. tools: those that may be called, none if calls are free.

    eos_token_ids: the model's. has_call: it holds at least one. has_many_calls: it may hold more than one.
    forbids_calls: tools are offered and not to be called: no text begins a call by a marker.
    is_reasoning_open: the prompt has begun the thoughts. thinking_token_budget: most tokens of thoughts.
    tools_place: the request's field.
    """

    format: OutputFormat
    eos_token_ids: tuple[int, ...]
    tools: tuple[ToolRule, ...] = ()
    has_call: bool = False
    has_many_calls: bool = True
    forbids_calls: bool = False
    is_reasoning_open: bool = False
    thinking_token_budget: int | None = None
    tools_place: str = "tools"

    @property
    def purpose(self) -> Purpose:
        """What a request with these rules is counted as."""
        if self.tools:
            return "tools"
        has_thoughts = self.is_reasoning_open or self.thinking_token_budget is not None
        return "thinking" if has_thoughts else ""

    def binds(self, has_answer_format: bool) -> bool:
        """Whether a grammar has to be made of them, where the answer has a format of its own or not."""
        if self.tools or (self.forbids_calls and not has_answer_format):
            return True
        return self.format.thinking is not None and (
            has_answer_format or self.thinking_token_budget is not None
        )


def make_output_rules(
    output_format: OutputFormat,
    eos_token_ids: Sequence[int],
    tools: Sequence[Tool] = (),
    choice: ToolChoice | None = None,
    *,
    is_parallel: bool = True,
    is_reasoning_open: bool = False,
    thinking_token_budget: int | None = None,
    fields: ToolFields = CHAT_FIELDS,
) -> OutputRules:
    """The rules of a request that offers `tools`, which have been checked but for their schemas.

    Schemas are followed where a tool is strict, and where a call is required; else arguments are any JSON
    object.
    """
    mode: Literal["none", "auto", "required"] = "auto" if choice is None else choice.mode
    names = None if choice is None else choice.names
    offered = [
        _make_rule(tool, f"{fields.find_place(number)}.{fields.schema}", mode == "required" or tool.strict)
        for number, tool in enumerate(tools)
        if mode != "none" and (names is None or tool.name in names)
    ]
    is_named = mode == "required" and names is not None and len(offered) == 1
    calls = output_format.calls
    return OutputRules(
        format=output_format,
        eos_token_ids=tuple(eos_token_ids),
        tools=tuple(offered),
        has_call=mode == "required",
        has_many_calls=is_parallel and not is_named and calls is not None and calls.is_parallel,
        forbids_calls=mode == "none" and bool(tools) and calls is not None,
        is_reasoning_open=is_reasoning_open,
        thinking_token_budget=thinking_token_budget,
        tools_place=fields.tools,
    )


def _make_rule(tool: Tool, place: str, is_followed: bool) -> ToolRule:
    schema = tool.parameters
    if not schema or (schema.get("properties") == {} and not _OPEN.intersection(schema)):
        return ToolRule(tool.name, takes_arguments=False)
    return ToolRule(tool.name, schema if is_followed else None, place, is_strict=tool.strict)


# With one of these an object may have properties beside those of `properties`, or is said more of.
_OPEN = {"additionalProperties", "patternProperties", "$ref", "anyOf", "oneOf", "allOf", "required"}
