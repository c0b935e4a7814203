"""AnswerReader: a request's outputs -> events, read by the format that its model writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..events import OutputEvent, ReasoningDelta, TextDelta
from ..outputs import CompletionOutput, RequestOutput
from ..text.tokenizer import Tokenizer
from ..tools import Tool
from .output_format import OutputFormat, is_reasoning_open
from .reading.output_parser import OutputParser


@dataclass(frozen=True, slots=True)
class Parsing:
    """What answers are parsed with. tools: that may be called, without what parsers do not need."""

    format: OutputFormat
    tokenizer: Tokenizer
    tools: list[Tool]
    shows_reasoning: bool


def choose_parsing(
    known: OutputFormat | None,
    tokenizer: Tokenizer,
    tools: Sequence[Tool],
    may_call: bool,
    shows_reasoning: bool = True,
) -> Parsing | None:
    """How answers are parsed; None where they are nothing but text. `known`: the model's format."""
    if known is None or not (tools or known.thinking is not None):
        return None
    callable_tools = [Tool(tool.name, None, tool.parameters, tool.strict) for tool in tools if may_call]
    return Parsing(known, tokenizer, callable_tools, shows_reasoning)


class AnswerReader:
    """The outputs of one request -> events. Each of its answers has a parser of its own."""

    def __init__(self, parsing: Parsing | None) -> None:
        """`parsing` None: all is text."""
        self._parsing = parsing
        self._parsers: dict[int, OutputParser] = {}
        self._opening: Sequence[int] | None = None  # looked for once: prompts are long, and answers many

    @property
    def is_plain(self) -> bool:
        """Whether answers are nothing but text."""
        return self._parsing is None

    @property
    def num_reasoning_tokens(self) -> int | None:
        """The reasoning tokens of all answers so far, shown or not; None for a model that does not think."""
        if self._parsing is None or self._parsing.format.thinking is None:
            return None
        return sum(parser.num_reasoning_tokens for parser in self._parsers.values())

    @property
    def num_errors(self) -> int:
        """Calls of all answers that could not be read, and are among the text."""
        return sum(parser.num_errors for parser in self._parsers.values())

    def has_errors(self, index: int) -> bool:
        """Whether a call of this answer could not be read."""
        return index in self._parsers and self._parsers[index].num_errors > 0

    def read(self, output: RequestOutput) -> list[list[OutputEvent]]:
        """What is new of each of `output.outputs`, which are deltas, or whole."""
        return [self.read_one(output, completion, completion.text) for completion in output.outputs]

    def read_one(self, output: RequestOutput, completion: CompletionOutput, text: str) -> list[OutputEvent]:
        """What is new of one of them, which is this text."""
        parsing = self._parsing
        if parsing is None:
            return [TextDelta(text)] if text else []
        parser = self._parsers.get(completion.index)
        if parser is None:
            if self._opening is None:
                is_open = is_reasoning_open(parsing.format, output.prompt_token_ids)
                self._opening = parsing.format.thinking_open_ids if is_open else ()
            parser = OutputParser(parsing.format, parsing.tokenizer, self._opening, parsing.tools)
            self._parsers[completion.index] = parser
        is_last = completion.finish_reason is not None
        events: list[OutputEvent] = parser.take(text, completion.token_ids, is_last)
        if not parsing.shows_reasoning:
            events = [event for event in events if not isinstance(event, ReasoningDelta)]
        return events
