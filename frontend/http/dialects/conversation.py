"""A conversation of any API -> what the engine takes, and the engine's outputs -> events of the answers.

Each endpoint fills a Conversation from its own body and encodes the events in its own form.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from ....ipc.errors import EngineDeadError
from ....ipc.params.beam_search import BeamSearch
from ....ipc.params.sampling_params import SamplingParams
from ....ipc.protocol.messages import FrontendCounts
from ...events import OutputEvent
from ...formats.answer_reader import AnswerReader, choose_parsing
from ...formats.grammars.rules import OutputRules, make_output_rules
from ...formats.offered_tools import CHAT_FIELDS, ToolFields, check_tools, list_unfollowed
from ...formats.output_format import OutputFormat, is_reasoning_open
from ...outputs import RequestOutput
from ...requests.input_processor import PreparedParams
from ...tools import Tool, ToolChoice
from ..bodies.schema import ChatMessage
from ..caller import Caller
from ..errors import FieldError
from ..serving import Serving
from ..text_process.jobs import RenderJob
from .formats import FormatSource, compile_format
from .prompts import check_conversation, prepare_params, render_chat

ParsedOutputs = AsyncGenerator[tuple[RequestOutput, Sequence[Sequence[OutputEvent]]], None]
"""Outputs of a request, each with the events of each of its answers."""

_MAX_INLINE_TOKENS = 1000  # parsed in the event loop: 5 ms


@dataclass(slots=True)
class MessageDraft:
    """A message of a conversation while its pieces are collected, of APIs that have them one by one."""

    role: str
    texts: list[str] = field(default_factory=list[str])
    thoughts: list[str] = field(default_factory=list[str])
    calls: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    call_id: str | None = None

    def add_call(self, call_id: str, name: str, arguments: Any) -> None:
        """`arguments`: an object, or its JSON."""
        function = {"name": name, "arguments": arguments}
        self.calls.append({"id": call_id, "type": "function", "function": function})

    def finish(self, separator: str = "\n") -> ChatMessage:
        """The message, without content if it has calls only. separator: between texts."""
        return ChatMessage(
            role=self.role,
            content=separator.join(self.texts) if self.texts or not self.calls else None,
            tool_calls=self.calls or None,
            tool_call_id=self.call_id,
            reasoning_content="\n".join(self.thoughts) or None,
        )


@dataclass(slots=True, kw_only=True)
class Conversation:
    """What a request asks the model to continue, and how. Consumed by `prepare_conversation`.

    choice: of `tools`. parallel: a turn may have several calls. variables: of the chat template, over those
    that stand for reasoning_effort. thinking_token_budget: thoughts end after so many tokens.
    shows_reasoning: thoughts are among the events. format: what the answer after thoughts looks like.
    param, fields: what the request calls the messages and its tools.
    """

    messages: list[ChatMessage]
    tools: list[Tool] = field(default_factory=list[Tool])
    choice: ToolChoice = field(default_factory=ToolChoice)
    parallel: bool = True
    variables: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    thinking_token_budget: int | None = None
    shows_reasoning: bool = True
    format: FormatSource | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    param: str = "messages"
    fields: ToolFields = CHAT_FIELDS

    @property
    def may_call(self) -> bool:
        """Whether the answer may have calls."""
        return bool(self.tools) and self.choice.mode != "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedConversation:
    """The prompt and parameters for the engine, and what reads its outputs."""

    prompt: list[int]
    params: PreparedParams
    reader: AnswerReader


async def prepare_conversation(
    serving: Serving,
    caller: Caller,
    params: SamplingParams,
    conversation: Conversation,
    *,
    search: BeamSearch | None = None,
    logprobs_name: str = "top_logprobs",
) -> PreparedConversation:
    """Check, render and tokenize. Raises InputErrors and ApiErrors before anything is generated.

    logprobs_name: the request's field that has become `params.logprobs`.
    """
    check_tools(conversation.tools, conversation.choice, conversation.fields)
    if conversation.thinking_token_budget is not None and not serving.is_thinking:
        budget = conversation.thinking_token_budget
        raise FieldError("thinking_token_budget", budget, "none: this model does not think")
    may_call = conversation.may_call
    parsing = choose_parsing(
        serving.output_format, serving.tokenizer, conversation.tools, may_call, conversation.shows_reasoning
    )
    if parsing is not None:
        params.skip_special_tokens = False  # markers may be special tokens
    prepared = await prepare_params(serving, params, caller, None, search=search, logprobs_name=logprobs_name)
    max_model_len = serving.llm.facts.max_model_len
    job = make_render_job(conversation, max_model_len, prepared)
    prompt = await render_chat(serving, job, caller)
    if may_call and (parsing is None or parsing.format.calls is None):
        allowed = "none: how this model writes calls is not known (--tool-call-parser names a format)"
        raise FieldError(conversation.fields.tools, f"{len(conversation.tools)} tools", allowed)
    if search is None:
        rules = None if parsing is None else _make_rules(serving, conversation, parsing.format, prompt)
        grammar = await _make_grammar(serving, caller, conversation.format, rules)
        purpose = "" if rules is None else rules.purpose
        prepared = dataclasses.replace(prepared, grammar=grammar, purpose=purpose)
    return PreparedConversation(prompt=prompt, params=prepared, reader=AnswerReader(parsing))


async def parse_outputs(
    serving: Serving, outputs: AsyncGenerator[RequestOutput, None], reader: AnswerReader
) -> ParsedOutputs:
    """Each output with the events of each of its answers."""
    async with aclosing(outputs):
        async for output in outputs:
            yield output, await read_output(serving, output, reader)


async def read_output(
    serving: Serving, output: RequestOutput, reader: AnswerReader
) -> Sequence[Sequence[OutputEvent]]:
    """The events of each answer of an output. The engine is told what was counted in them."""
    if sum(len(one.token_ids) for one in output.outputs) <= _MAX_INLINE_TOKENS:
        events = reader.read(output)
    else:
        events = await asyncio.to_thread(reader.read, output)
    if output.finished:
        counts = FrontendCounts(reader.num_errors, reader.num_reasoning_tokens or 0)
        if any((counts.num_tool_parse_errors, counts.num_reasoning_tokens)):
            with contextlib.suppress(EngineDeadError):  # the answer is here all the same
                serving.llm.add_counts(counts)
    return events


def make_render_job(
    conversation: Conversation, max_model_len: int | None = None, prepared: PreparedParams | None = None
) -> RenderJob:
    """The job that makes token ids of a conversation."""
    return RenderJob(
        messages=conversation.messages,
        add_generation_prompt=conversation.add_generation_prompt,
        continue_final_message=conversation.continue_final_message,
        variables=_make_variables(conversation),
        add_special_tokens=conversation.add_special_tokens,
        param=conversation.param,
        max_model_len=max_model_len,
        truncation=None if prepared is None else prepared.truncation,
        tools=conversation.tools,
        schema_places=list_unfollowed(conversation.tools, conversation.choice, conversation.fields),
    )


def make_checked_job(serving: Serving, conversation: Conversation) -> RenderJob:
    """The same of a conversation that is only tokenized. Raises InputErrors and ApiErrors."""
    check_tools(conversation.tools, conversation.choice, conversation.fields)
    job = make_render_job(conversation)
    check_conversation(serving, job)
    return job


def _make_variables(conversation: Conversation) -> dict[str, Any] | None:
    """What the chat template is told. Some read reasoning_effort, others only enable_thinking."""
    effort = conversation.reasoning_effort
    if effort is None:
        return conversation.variables
    return {"reasoning_effort": effort, "enable_thinking": effort != "none", **(conversation.variables or {})}


def _make_rules(
    serving: Serving, conversation: Conversation, output_format: OutputFormat, prompt: list[int]
) -> OutputRules:
    return make_output_rules(
        output_format,
        serving.llm.facts.eos_token_ids,
        conversation.tools,
        conversation.choice,
        is_parallel=conversation.parallel,
        is_reasoning_open=is_reasoning_open(output_format, prompt),
        thinking_token_budget=conversation.thinking_token_budget,
        fields=conversation.fields,
    )


async def _make_grammar(
    serving: Serving, caller: Caller, source: FormatSource | None, rules: OutputRules | None
) -> str:
    if rules is not None:
        source = FormatSource(None, rules=rules) if source is None else source._replace(rules=rules)
    return "" if source is None else await compile_format(serving, source, caller)
