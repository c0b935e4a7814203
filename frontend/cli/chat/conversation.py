"""A conversation with a model: its messages, and how answers are sampled."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from threading import Event
from typing import TYPE_CHECKING, Any

from ....ipc.errors import InputError, PromptError
from ....ipc.params.sampling_params import SamplingParams
from ...events import AssistantMessage
from ..sampling_options import make_sampling_params
from .answer_printer import AnswerPrinter

if TYPE_CHECKING:
    from ....ipc.protocol.messages import EngineFacts
    from ...outputs import RequestOutput
    from ..session import Session

Turn = list[dict[str, Any]]  # messages: a question, and what follows it until the next

# The likeliest answer, up to the model's own end; most chat models recommend something else and get it.
DEFAULTS: dict[str, Any] = {"temperature": 0.0, "max_tokens": None}


@contextlib.contextmanager
def interrupts_noted() -> Generator[Event]:
    """Inside, a first Ctrl-C is only noted; a second one raises KeyboardInterrupt, in case nothing moves."""
    pressed = Event()

    def note(_number: int, _frame: object) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    if not sys.stdin.isatty():  # a pipe has no second message to go on with: Ctrl-C ends the program
        yield pressed
        return
    previous = signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, previous)


class Conversation:
    """The messages so far and how answers are made. `answer` prints as the text comes."""

    def __init__(
        self,
        session: Session,
        sampling: Mapping[str, Any],
        system: str | None,
        is_verbose: bool,
        is_thinking: bool | None = None,
    ) -> None:
        """`is_thinking` None leaves it to the model's chat template."""
        self._session = session
        self.sampling = dict(sampling)  # fields that the user set; others are the model's or command's
        self._is_verbose = is_verbose
        self._turns: list[Turn] = []
        self._unanswered: str | None = None  # the last message, if it was refused or failed
        self.system = system
        self.is_thinking = is_thinking

    @property
    def params(self) -> SamplingParams:
        """How the next answer is sampled."""
        return make_sampling_params(self.sampling, self._session.default_sampling, DEFAULTS)

    @property
    def facts(self) -> EngineFacts:
        """The engine's."""
        return self._session.facts

    @property
    def num_messages(self) -> int:
        """Questions and answers so far, the system message left out."""
        return sum(map(len, self._turns))

    @property
    def messages(self) -> list[dict[str, Any]]:
        """All of them, the system message first."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *(message for turn in self._turns for message in turn)]

    def count_tokens(self) -> int:
        """Tokens of the conversation as the model sees it; takes as long as tokenizing it."""
        if not self._turns:
            return 0
        return len(self._session.render_chat(self.messages, self.is_thinking))

    def set_field(self, name: str, value: Any) -> None:
        """Set a sampling field, or take it back: None. Raises SamplingParamsError."""
        fields = {key: old for key, old in self.sampling.items() if key != name}
        if value is not None:
            fields[name] = value
        SamplingParams(**fields)
        self.sampling = fields

    def reset(self) -> None:
        """Forget every message; settings stay."""
        self._turns.clear()
        self._unanswered = None

    def replace(self, messages: Sequence[dict[str, Any]]) -> None:
        """Go on with another conversation, its system message included. Raises PromptError if it does not fit
        into the model, or its chat template refuses it; then nothing is changed.
        """
        num_tokens = len(self._session.render_chat(messages, self.is_thinking))
        if num_tokens >= (max_tokens := self.facts.max_model_len):
            raise PromptError("messages", f"{num_tokens} tokens", f"fewer than the model's {max_tokens}")
        first = messages[:1] if messages and messages[0]["role"] == "system" else []
        turns: list[Turn] = []
        for message in messages[len(first) :]:
            if message["role"] == "user" or not turns:
                turns.append([])
            turns[-1].append(message)
        self.reset()
        self._turns = turns
        self.system = first[0]["content"] if first else None

    def retry(self) -> None:
        """Ask the last question again, in the place of its answer, or of what kept it from having one.

        Raises InputError without a question, and as `answer`; then the old answer stays.
        """
        if self._unanswered is not None:
            self.answer(self._unanswered)
            return
        if not self._turns or self._turns[-1][0]["role"] != "user":
            raise InputError("/retry", "", "after a question")
        last = self._turns.pop()
        num_before = len(self._turns)
        try:
            self.answer(last[0]["content"])
        finally:
            if len(self._turns) == num_before:
                self._turns.append(last)
                self._unanswered = None

    def answer(self, message: str) -> None:
        """Print the model's answer and remember both. Ctrl-C ends the answer early; what was shown stays.

        Raises PromptError when the conversation does not fit into the model, RequestFailedError when the
        engine fails it; then nothing is remembered but what `retry` asks again.
        """
        self._unanswered = message
        question = {"role": "user", "content": message}
        printer = AnswerPrinter()
        try:
            answer = self._print_answer([*self.messages, question], printer)
        finally:
            printer.end_line()  # what is said next stands on its own line
        self._turns.append([question, _to_message(answer)])
        self._unanswered = None

    def _print_answer(self, messages: list[dict[str, Any]], printer: AnswerPrinter) -> AssistantMessage:
        answer = AssistantMessage()
        rates = AnswerRates()
        with interrupts_noted() as interrupt:
            stream = self._session.chat(messages, self.params, self.is_thinking)
            for output, events in stream:
                rates.take(output)
                for event in events:
                    answer.add(event)
                    printer.take(event)
                if interrupt.is_set():
                    stream.close()
                    break
        printer.end_message()
        if note := "stopped" if interrupt.is_set() else self._describe_cut(rates):
            printer.note(f"({note})")
        if self._is_verbose:
            print(rates.describe(), file=sys.stderr)
        return answer

    def _describe_cut(self, rates: AnswerRates) -> str:
        """Why an answer ends before the model ended it, '' if it did not."""
        if rates.finish_reason == "abort":
            return "cut: somebody has cancelled it"
        if rates.finish_reason != "length":
            return ""
        if rates.num_tokens == self.params.max_tokens:
            return f"cut: max_tokens={self.params.max_tokens}"
        return f"cut: the model's {self.facts.max_model_len} tokens are used up"


def _to_message(answer: AssistantMessage) -> dict[str, Any]:
    """An answer as it stands among messages."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.content}
    return message | ({"reasoning_content": answer.reasoning} if answer.reasoning else {})


class AnswerRates:
    """Counts and times of one answer, and how it ended."""

    def __init__(self) -> None:
        self._started_at = time.perf_counter()
        self._first_at: float | None = None
        self._last_at = self._started_at
        self._num_prompt_tokens = self._num_cached_tokens = self.num_tokens = 0
        self.finish_reason: str | None = None

    def take(self, output: RequestOutput) -> None:
        """Count what an output brings, which has just come."""
        self._last_at = time.perf_counter()
        self._first_at = self._first_at or self._last_at
        self._num_prompt_tokens = len(output.prompt_token_ids)
        self._num_cached_tokens = output.num_cached_tokens or self._num_cached_tokens
        for completion in output.outputs:
            self.num_tokens += len(completion.token_ids)
            self.finish_reason = completion.finish_reason

    def describe(self) -> str:
        """One line. The prompt's rate leaves out cached tokens, the answer's the first token."""
        first_at = self._first_at or self._last_at
        latency_s = first_at - self._started_at
        num_computed = self._num_prompt_tokens - self._num_cached_tokens
        return (
            f"[{self._num_prompt_tokens} tokens in, {self._num_cached_tokens} cached, "
            f"{_format_rate(num_computed, latency_s)}; first token after {latency_s:.3f} s; "
            f"{self.num_tokens} out, {_format_rate(self.num_tokens - 1, self._last_at - first_at)}]"
        )


def _format_rate(count: int, seconds: float) -> str:
    return f"{count / seconds:,.0f} tokens/s" if count > 0 and seconds > 0 else "- tokens/s"
