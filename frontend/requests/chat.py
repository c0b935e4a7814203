"""LLM.chat beyond rendering: tools that are offered, the grammar for their calls, and answers as messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...ipc.errors import InputError
from ..events import AssistantMessage
from ..formats.answer_reader import AnswerReader, choose_parsing
from ..formats.grammars.rules import make_output_rules
from ..formats.offered_tools import check_tools, list_unfollowed, read_tool_choice, read_tools
from ..formats.output_format import OutputFormat, is_reasoning_open
from ..formats.schemas.json_schema import check_valid
from ..outputs import CompletionOutput, RequestOutput
from ..text.tokenizer import Tokenizer
from .input_processor import InputProcessor, PreparedParams
from .prompts import ParsedPrompt


class ChatTurns:
    """The turns that one call of LLM.chat asks for. Raises InputErrors.

    tools, choice, is_parallel: as requests over HTTP have them. parsing: None where answers are nothing but
    text; else theirs has to have its special tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        known: OutputFormat | None,
        tools: Any,
        choice: Any,
        is_parallel: bool,
        eos_token_ids: Sequence[int],
    ) -> None:
        """`known`: the model's format."""
        self.tools = read_tools(tools)
        self._choice = read_tool_choice(choice)
        check_tools(self.tools, self._choice)
        for place, tool in zip(list_unfollowed(self.tools, self._choice), self.tools, strict=True):
            if place and tool.parameters is not None:
                check_valid(place, tool.parameters)
        self._is_parallel = is_parallel
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        may_call = bool(self.tools) and self._choice.mode != "none"
        if may_call and (known is None or known.calls is None):
            allowed = "None: how this model writes calls is not known"
            raise InputError("tools", f"{len(self.tools)} tools", allowed)
        self.parsing = choose_parsing(known, tokenizer, self.tools, may_call)

    def prepare(
        self, processor: InputProcessor, params: Sequence[PreparedParams], prompts: Sequence[ParsedPrompt]
    ) -> list[PreparedParams]:
        """The parameters with the grammar of each prompt's turn. Raises SamplingParamsError."""
        if self.parsing is None:
            return list(params)
        made: dict[tuple[int, bool], PreparedParams] = {}
        return [
            self._bind(processor, prepared, is_reasoning_open(self.parsing.format, prompt.token_ids), made)
            for prepared, prompt in zip(params, prompts, strict=True)
        ]

    def parse(self, output: RequestOutput) -> None:
        """Put each finished answer's message beside its text."""
        if self.parsing is None:
            return
        reader = AnswerReader(self.parsing)
        for completion in output.outputs:
            completion.message = message = AssistantMessage()
            for event in reader.read_one(output, completion, self._show_all(completion)):
                message.add(event)

    def _bind(
        self,
        processor: InputProcessor,
        params: PreparedParams,
        is_open: bool,
        made: dict[tuple[int, bool], PreparedParams],
    ) -> PreparedParams:
        assert self.parsing is not None
        key = id(params), is_open
        if key not in made:
            rules = make_output_rules(
                self.parsing.format,
                self._eos_token_ids,
                self.tools,
                self._choice,
                is_parallel=self._is_parallel,
                is_reasoning_open=is_open,
            )
            made[key] = processor.bind_rules(params, rules)
        return made[key]

    def _show_all(self, completion: CompletionOutput) -> str:
        """An answer's text with its special tokens, some of which are markers."""
        text = self._tokenizer.decode(completion.token_ids)
        if isinstance(completion.stop_reason, str):
            return text.rpartition(completion.stop_reason)[0] or text
        return text
