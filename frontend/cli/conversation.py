"""A conversation with a model: its messages, how answers are sampled, and the tools that it may call."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ...ipc.sampling_params import SamplingParams
from ..output_formats.events import AssistantMessage, ToolCall, ToolCallEnd
from .answer_printer import AnswerPrinter
from .sampling_options import make_sampling_params
from .tools import run_call

if TYPE_CHECKING:
    from ...ipc.messages import EngineFacts
    from ..output_formats.tools import Tool
    from ..outputs import RequestOutput
    from .session import Session

# The likeliest answer, up to the model's own end; most chat models recommend something else and get it.
DEFAULTS: dict[str, Any] = {"temperature": 0.0, "max_tokens": None}
MAX_ROUNDS = 5  # of an answer: turns that call tools, and the one that uses their results


class Conversation:
    """The messages so far and how answers are made. `answer` prints as the text comes."""

    def __init__(
        self,
        session: Session,
        given: Mapping[str, Any],
        system: str | None,
        is_verbose: bool,
        tools: Sequence[Tool] = (),
        is_thinking: bool | None = None,
    ) -> None:
        """`is_thinking` None leaves it to the model's chat template."""
        self._session = session
        self.given = dict(given)  # the sampling fields that the user set; others are the model's or command's
        self._is_verbose = is_verbose
        self._messages: list[dict[str, Any]] = []
        self.system = system
        self.tools = tools
        self.is_thinking = is_thinking

    @property
    def params(self) -> SamplingParams:
        """How the next answer is sampled."""
        return make_sampling_params(self.given, self._session.default_sampling, DEFAULTS)

    @property
    def facts(self) -> EngineFacts:
        """The engine's facts."""
        return self._session.facts

    @property
    def num_messages(self) -> int:
        """Questions, answers and results so far, the system message left out."""
        return len(self._messages)

    def count_tokens(self) -> int:
        """Tokens of the conversation as the model sees it; takes as long as tokenizing it."""
        if not self._messages:
            return 0
        return len(self._session.render_chat(self._with_system([]), self.tools, self.is_thinking))

    def set_field(self, name: str, value: Any) -> None:
        """Set a sampling field, or take it back: None. Raises SamplingParamsError."""
        given = {key: old for key, old in self.given.items() if key != name}
        if value is not None:
            given[name] = value
        SamplingParams(**given)
        self.given = given

    def reset(self) -> None:
        """Forget every message; settings stay."""
        self._messages.clear()

    def answer(self, message: str) -> None:
        """Print the model's answer and remember both. Ctrl-C ends the answer early; what was shown stays.

        Tools that the model calls are run, and their results are given to it. Raises PromptError when the
        conversation does not fit into the model, RequestFailedError when the engine fails it; then nothing
        is remembered.
        """
        turn: list[dict[str, Any]] = [{"role": "user", "content": message}]
        printer = AnswerPrinter()
        for _ in range(MAX_ROUNDS):
            answer = self._print_answer(turn, printer)
            turn.append(_to_message(answer))
            if not answer.tool_calls:
                break
            turn += [self._run_call(call, printer) for call in answer.tool_calls]
        else:
            printer.note(f"no answer after {MAX_ROUNDS} rounds of tool calls")
        self._messages += turn

    def _with_system(self, more: list[dict[str, Any]]) -> list[dict[str, Any]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self._messages, *more]

    def _print_answer(self, turn: list[dict[str, Any]], printer: AnswerPrinter) -> AssistantMessage:
        """One message of the model, without calls that the end has cut, or of an answer that was stopped."""
        answer = AssistantMessage()
        whole: set[int] = set()  # calls
        rates = AnswerRates()
        messages = self._with_system(turn)
        with interrupts_noted() as interrupt:
            stream = self._session.chat(messages, self.params, self.tools, self.is_thinking)
            for output, events in stream:
                rates.take(output)
                for event in events:
                    answer.add(event)
                    printer.take(event)
                    if isinstance(event, ToolCallEnd):
                        whole.add(event.index)
                if interrupt.is_set:
                    stream.close()
                    whole.clear()
                    break
        answer.tool_calls = [call for index, call in enumerate(answer.tool_calls) if index in whole]
        printer.end_message(answer)
        if self._is_verbose:
            print(rates.describe(), file=sys.stderr)
        return answer

    def _run_call(self, call: ToolCall, printer: AnswerPrinter) -> dict[str, Any]:
        """The message with a call's result."""
        result = run_call(call, self.tools)
        printer.show_result(result)
        return {"role": "tool", "tool_call_id": call.call_id, "name": call.name, "content": result}


def _to_message(answer: AssistantMessage) -> dict[str, Any]:
    """An answer as it stands among messages."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.content}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in answer.tool_calls
        ]
    return message


class AnswerRates:
    """Counts and times of one answer, for --verbose."""

    def __init__(self) -> None:
        self._started_at = time.perf_counter()
        self._first_at: float | None = None
        self._last_at = self._started_at
        self._num_prompt_tokens = self._num_cached_tokens = self._num_tokens = 0

    def take(self, output: RequestOutput) -> None:
        """Count a delta."""
        self._last_at = time.perf_counter()
        self._first_at = self._first_at or self._last_at
        self._num_prompt_tokens = len(output.prompt_token_ids)
        self._num_cached_tokens = output.num_cached_tokens or self._num_cached_tokens
        self._num_tokens += sum(len(completion.token_ids) for completion in output.outputs)

    def describe(self) -> str:
        """One line. The prompt's rate leaves out cached tokens, the answer's the first token."""
        first_at = self._first_at or self._last_at
        latency_s = first_at - self._started_at
        num_computed = self._num_prompt_tokens - self._num_cached_tokens
        return (
            f"[{self._num_prompt_tokens} tokens in, {self._num_cached_tokens} cached, "
            f"{_format_rate(num_computed, latency_s)}; first token after {latency_s:.3f} s; "
            f"{self._num_tokens} out, {_format_rate(self._num_tokens - 1, self._last_at - first_at)}]"
        )


class Interrupt:
    """Whether Ctrl-C was pressed."""

    is_set = False


@contextmanager
def interrupts_noted() -> Generator[Interrupt]:
    """Inside, a first Ctrl-C is only noted; a second one raises KeyboardInterrupt, in case nothing moves."""
    interrupt = Interrupt()

    def note(_number: int, _frame: object) -> None:
        if interrupt.is_set:
            raise KeyboardInterrupt
        interrupt.is_set = True

    if not sys.stdin.isatty():  # a pipe has no second message to go on with: Ctrl-C ends the program
        yield interrupt
        return
    previous = signal.signal(signal.SIGINT, note)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, previous)


def _format_rate(count: int, seconds: float) -> str:
    return f"{count / seconds:,.0f} tokens/s" if count > 0 and seconds > 0 else "- tokens/s"
