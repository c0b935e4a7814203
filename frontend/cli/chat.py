"""`quire chat`: a conversation at the terminal, or one answer to what is piped in."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ...ipc.errors import InputError, PromptError, SamplingParamsError, did_you_mean
from ...ipc.sampling_params import SamplingParams
from .engine_choice import add_engine_options, read_engine_choice
from .exit_codes import ExitCode
from .parser import Parser
from .sampling_options import add_sampling_options, make_sampling_params, read_sampling_options

if TYPE_CHECKING:
    from ..outputs import RequestOutput
    from .session import Session

_HELP = """\
/help                 this text
/set NAME VALUE       set temperature, top_p, top_k, min_p, seed, max_tokens, repetition_penalty or system
/set                  show what is set
/reset                forget the conversation
/bye                  leave (Ctrl-D too)
\"\"\"                   begin and end a message of several lines
Ctrl-C stops an answer.
"""
# The likeliest answer, up to the model's own end; most chat models recommend something else and get it.
DEFAULTS: dict[str, Any] = {"temperature": 0.0, "max_tokens": None}
_QUOTES = '"""'
_SETTABLE: dict[str, type] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
    "seed": int,
    "max_tokens": int,
    "system": str,
}


def run(argv: Sequence[str]) -> int:
    """Run `quire chat`."""
    options = _make_parser().parse(argv)
    given = read_sampling_options(options)
    engine_args = read_engine_choice(options)
    message = None if sys.stdin.isatty() else sys.stdin.read().strip()
    if message == "":
        raise PromptError("message", "", "a text piped in, or a terminal to chat at")
    from .session import Session

    with Session(engine_args, options.attach) as session:
        conversation = Conversation(session, given, options.system, options.verbose)
        if message is not None:
            conversation.answer(message)
            return ExitCode.OK
        return Terminal(conversation).run()


class Conversation:
    """The messages so far and how answers are sampled. `answer` prints as the text comes."""

    def __init__(self, session: Session, given: dict[str, Any], system: str | None, is_verbose: bool) -> None:
        self._session = session
        self._given = given
        self._is_verbose = is_verbose
        self._messages: list[dict[str, str]] = []
        self.system = system

    @property
    def params(self) -> SamplingParams:
        """How the next answer is sampled."""
        return make_sampling_params(self._given, self._session.default_sampling, DEFAULTS)

    def set_field(self, name: str, value: Any) -> None:
        """Set a sampling field, or the system message. Raises SamplingParamsError and changes nothing."""
        if name == "system":
            self.system = value
            return
        SamplingParams(**{**self._given, name: value})
        self._given = {**self._given, name: value}

    def reset(self) -> None:
        """Forget every message; settings stay."""
        self._messages.clear()

    def answer(self, message: str) -> None:
        """Print the model's answer and remember both. Ctrl-C ends the answer early; what was shown stays.

        Raises PromptError when the conversation does not fit into the model; then nothing is remembered.
        """
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*self._messages, {"role": "user", "content": message}]
        prompt = self._session.render_chat([*system, *messages])
        text = self._print_answer(prompt)
        self._messages = [*messages, {"role": "assistant", "content": text}]

    def _print_answer(self, prompt: Any) -> str:
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


class Terminal:
    """Reads messages and commands until the user leaves."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation

    def run(self) -> int:
        """The loop; returns the exit code. Ctrl-D and /bye leave, Ctrl-C at the prompt does not."""
        _load_line_editing()
        print("/help lists the commands, Ctrl-D leaves")
        while True:
            try:
                message = self._read_message()
            except EOFError:
                print()
                return ExitCode.OK
            except KeyboardInterrupt:
                print("\nCtrl-D or /bye leaves")
                continue
            if message in ("/bye", "/exit", "/quit"):
                return ExitCode.OK
            try:
                self._take(message)
            except InputError as error:
                print(f"{error} (/reset starts anew)" if isinstance(error, PromptError) else error)

    def _read_message(self) -> str:
        line = input(">>> ").strip()
        if not line.startswith(_QUOTES):
            return line
        lines = [line.removeprefix(_QUOTES)]
        while not lines[-1].rstrip().endswith(_QUOTES):
            lines.append(input("... "))
        lines[-1] = lines[-1].rstrip().removesuffix(_QUOTES)
        return "\n".join(lines).strip()

    def _take(self, message: str) -> None:
        if message.startswith("/"):
            self._run_command(message)
        elif message:
            self._conversation.answer(message)

    def _run_command(self, line: str) -> None:
        name, *words = line.split(maxsplit=2)
        if name == "/help":
            print(_HELP, end="")
        elif name == "/reset":
            self._conversation.reset()
            print("forgotten")
        elif name == "/set":
            self._set(words)
        else:
            known = ("/help", "/set", "/reset", "/bye")
            print(f"{name}: not a command{did_you_mean(name, known) or ', one of ' + ' '.join(known)}")

    def _set(self, words: list[str]) -> None:
        if not words:
            params = self._conversation.params
            for name in _SETTABLE:
                value = self._conversation.system if name == "system" else getattr(params, name)
                print(f"{name:<20}  {value}")
            return
        name, text = words[0], words[1] if len(words) > 1 else ""
        if name not in _SETTABLE:
            raise InputError("set", name, f"one of {', '.join(_SETTABLE)}{did_you_mean(name, _SETTABLE)}")
        self._conversation.set_field(name, _parse_value(name, text))


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
        """One line; the rate is over the tokens after the first."""
        first_at = self._first_at or self._last_at
        decode_s = self._last_at - first_at
        rate = f"{(self._num_tokens - 1) / decode_s:,.0f} tokens/s" if decode_s > 0 else "-"
        latency_s = first_at - self._started_at
        tokens = (
            f"{self._num_prompt_tokens} tokens in, {self._num_cached_tokens} cached, {self._num_tokens} out"
        )
        return f"[{tokens}, first after {latency_s:.3f} s, then {rate}]"


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


def _parse_value(name: str, text: str) -> Any:
    if not text:
        raise InputError(name, text, f"/set {name} VALUE")
    try:
        return _SETTABLE[name](text)
    except ValueError:
        allowed = "an integer" if _SETTABLE[name] is int else "a number"
        raise SamplingParamsError(name, text, allowed) from None


def _load_line_editing() -> None:
    """Arrow keys and history at the prompt, where Python was built with them."""
    try:
        import readline
    except ImportError:
        return
    readline.parse_and_bind("tab: self-insert")


def _make_parser() -> Parser:
    parser = Parser(
        "quire chat",
        "Talk to a chat model. With a pipe: the whole of it is one message, and the answer is printed.",
        _HELP,
    )
    chat: Any = parser.add_argument_group("chat options")
    chat.add_argument("--system", metavar="TEXT", help="the system message")
    chat.add_argument("--verbose", action="store_true", help="tokens and rates after each answer, on stderr")
    sampling: Any = parser.add_argument_group(
        "sampling options", "Defaults: the model's own, else temperature 0; as long as the model goes on."
    )
    add_engine_options(parser)
    parser.set_defaults(log_level="WARNING")  # a text is not to be preceded by a table
    add_sampling_options(sampling)  # after the engine's, whose --seed it takes over
    return parser
