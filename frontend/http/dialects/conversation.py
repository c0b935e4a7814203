"""A conversation of any API -> what the engine takes, and the engine's outputs -> events of the answers.

Each endpoint fills a Conversation from its own body and encodes the events in its own form.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ....ipc.errors import EngineDeadError
from ....ipc.params.beam_search import BeamSearch
from ....ipc.params.sampling_params import SamplingParams
from ....ipc.protocol.messages import FrontendCounts
from ...events import OutputEvent
from ...formats.answer_reader import AnswerReader, choose_parsing
from ...formats.grammars.rules import OutputRules, make_output_rules
from ...formats.offered_tools import check_tools
from ...formats.output_format import OutputFormat, is_reasoning_open
from ...outputs import RequestOutput
from ...requests.input_processor import PreparedParams
from ...requests.prompts import find_truncation
from ..bodies.schema import ChatMessage
from ..caller import Caller
from ..errors import FieldError
from ..serving import Serving
from ..text_process.jobs import Conversation, GrammarJob
from .formats import compile_format
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


async def prepare_conversation(
    serving: Serving,
    caller: Caller,
    params: SamplingParams,
    conversation: Conversation,
    *,
    search: BeamSearch | None = None,
    logprobs_name: str = "top_logprobs",
) -> tuple[list[int], PreparedParams, AnswerReader]:
    """Check, render and tokenize: the prompt and parameters for the engine, and what reads its outputs.

    Consumes the conversation. Raises InputErrors and ApiErrors before anything is generated.
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
    source, conversation.format = conversation.format, None
    conversation.max_model_len = serving.llm.facts.max_model_len
    conversation.truncation = find_truncation(params, serving.llm.facts)
    prompt = await render_chat(serving, conversation, caller)
    if may_call and (parsing is None or parsing.format.calls is None):
        allowed = "none: how this model writes calls is not known (--tool-call-parser names a format)"
        raise FieldError(conversation.fields.tools, f"{len(conversation.tools)} tools", allowed)
    if search is None:
        rules = None if parsing is None else _make_rules(serving, conversation, parsing.format, prompt)
        grammar = await _make_grammar(serving, caller, source, rules)
        purpose = "" if rules is None else rules.purpose
        prepared = msgspec.structs.replace(prepared, grammar=grammar, purpose=purpose)
    return prompt, prepared, AnswerReader(parsing)


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
    if sum(len(completion.token_ids) for completion in output.outputs) <= _MAX_INLINE_TOKENS:
        events = reader.read(output)
    else:
        events = await asyncio.to_thread(reader.read, output)
    if output.finished:
        counts = FrontendCounts(reader.num_errors, reader.num_reasoning_tokens or 0)
        if any((counts.num_tool_parse_errors, counts.num_reasoning_tokens)):
            with contextlib.suppress(EngineDeadError):  # the answer is here all the same
                serving.llm.add_counts(counts)
    return events


def check_source(serving: Serving, conversation: Conversation) -> Conversation:
    """A conversation that is only tokenized. Raises InputErrors and ApiErrors."""
    check_tools(conversation.tools, conversation.choice, conversation.fields)
    check_conversation(serving, conversation)
    conversation.format = None
    return conversation


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
    serving: Serving, caller: Caller, source: GrammarJob | None, rules: OutputRules | None
) -> str:
    if rules is not None:
        source = msgspec.structs.replace(source or GrammarJob(), rules=rules)
    return "" if source is None else await compile_format(serving, source, caller)
