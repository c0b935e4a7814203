"""A conversation with a model: its messages, how answers are sampled, and the printing of one as it comes."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ...ipc.sampling_params import SamplingParams
from .sampling_options import make_sampling_params

if TYPE_CHECKING:
    from ...ipc.messages import EngineFacts
    from ..outputs import RequestOutput
    from ..prompts import Prompt
    from .session import Session

# The likeliest answer, up to the model's own end; most chat models recommend something else and get it.
DEFAULTS: dict[str, Any] = {"temperature": 0.0, "max_tokens": None}


class Conversation:
    """The messages so far and how answers are sampled. `answer` prints as the text comes."""

    def __init__(
        self, session: Session, given: Mapping[str, Any], system: str | None, is_verbose: bool
    ) -> None:
        self._session = session
        self.given = dict(given)  # the sampling fields that the user set; others are the model's or command's
        self._is_verbose = is_verbose
        self._messages: list[dict[str, str]] = []
        self.system = system

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
        """Questions and answers so far, the system message left out."""
        return len(self._messages)

    def count_tokens(self) -> int:
        """Tokens of the conversation as the model sees it; takes as long as tokenizing it."""
        if not self._messages:
            return 0
        tokenizer = self._session.tokenizer
        return len(tokenizer.encode(tokenizer.render_chat(self._with_system([])), add_special_tokens=False))

    def set_field(self, name: str, value: Any) -> None:
        """Set a sampling field or the system message, or take it back: None. Raises SamplingParamsError."""
        if name == "system":
            self.system = value
            return
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

        Raises PromptError when the conversation does not fit into the model, RequestFailedError when the
        engine fails it; then nothing is remembered.
        """
        question = {"role": "user", "content": message}
        text = self._print_answer(self._session.render_chat(self._with_system([question])))
        self._messages += [question, {"role": "assistant", "content": text}]

    def _with_system(self, more: list[dict[str, str]]) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self._messages, *more]

    def _print_answer(self, prompt: Prompt) -> str:
        pieces: list[str] = []
        rates = AnswerRates()
        with interrupts_noted() as interrupt:
            stream = self._session.stream([prompt], self.params)
            for _, output in stream:
                rates.take(output)
                if output.outputs:
                    pieces.append(output.outputs[0].text)
                    print(pieces[-1], end="", flush=True)
                if interrupt.is_set:
                    stream.close()
                    break
        print(flush=True)
        if self._is_verbose:
            print(rates.describe(), file=sys.stderr)
        return "".join(pieces)


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
