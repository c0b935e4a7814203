"""The prompt of `quire chat`: reads messages and commands, line by line, until the user leaves."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from ...ipc.errors import InputError, PromptError, RequestFailedError, SamplingParamsError, did_you_mean
from .conversation import Conversation
from .exit_codes import ExitCode
from .sampling_options import NUMBERS
from .tools import NAMES, find_tools

_QUOTES = '"""'
HELP = f"""\
/help                 this text
/set NAME VALUE       set a sampling parameter, or one of these:
/set system TEXT      the system message
/set think yes        have the model think first, or not: no
/set tools NAMES      tools that the model may call: {", ".join(NAMES)}
/set NAME default     take it back
/set, /show           show the model, the conversation's size and what is set
/reset                forget the conversation
/bye                  leave (Ctrl-D too)
{_QUOTES}                   begin and end a message of several lines
Ctrl-C stops an answer.
"""
_LEAVING = ("/bye", "/exit", "/quit")
_DEFAULT = "default"  # the value that takes a setting back
_NUMBERS = {field.name: field.kind for field in NUMBERS}
_SETTABLE = (*_NUMBERS, "stop", "system", "think", "tools")
_WORDS = {"yes": True, "no": False}


class Typed(NamedTuple):
    """What the user typed: a command only if it was not quoted."""

    text: str
    is_quoted: bool


class Terminal:
    """Talks with the user about one conversation."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": self._help,
            "/set": self._set,
            "/show": self._show,
            "/reset": self._reset,
        }

    def run(self) -> int:
        """The loop; returns the exit code. Ctrl-D and /bye leave, Ctrl-C does not."""
        _load_line_editing()
        _accept_any_bytes()
        print("/help lists the commands, Ctrl-D leaves")
        while True:
            try:
                typed = read_message()
            except EOFError:
                print()
                return ExitCode.OK
            except KeyboardInterrupt:
                print("\nCtrl-D or /bye leaves")
                continue
            if not typed.is_quoted and typed.text.strip() in _LEAVING:
                return ExitCode.OK
            self._take(typed)

    def _take(self, typed: Typed) -> None:
        """Run a command or print an answer; what goes wrong is told, and the conversation goes on."""
        try:
            if typed.text.startswith("/") and not typed.is_quoted:
                self._run_command(typed.text)
            elif typed.text:
                self._conversation.answer(typed.text)
        except PromptError as error:
            print(f"{error} (/reset starts anew)")
        except (InputError, RequestFailedError) as error:
            print(error)
        except KeyboardInterrupt:  # the second one while an answer does not move
            print("\nstopped; Ctrl-D or /bye leaves")

    def _run_command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        command = self._commands.get(name)
        if command is None:
            known = [*self._commands, "/bye"]
            hint = did_you_mean(name, known) or f", one of {' '.join(known)}"
            print(f"{name}: not a command{hint}; {_QUOTES} begins a message with a slash")
            return
        command(rest.strip())

    def _help(self, _rest: str) -> None:
        print(HELP, end="")

    def _reset(self, _rest: str) -> None:
        self._conversation.reset()
        print("forgotten")

    def _set(self, rest: str) -> None:
        name, _, text = rest.partition(" ")
        if not name:
            self._show("")
            return
        if name not in _SETTABLE:
            raise InputError("set", name, f"one of {', '.join(_SETTABLE)}{did_you_mean(name, _SETTABLE)}")
        value = _parse_value(name, text.strip())
        match name:
            case "system":
                self._conversation.system = value
            case "think":
                self._conversation.is_thinking = value
            case "tools":
                self._conversation.tools = value or ()
            case _:
                self._conversation.set_field(name, value)

    def _show(self, _rest: str) -> None:
        talk = self._conversation
        print(f"{'model':<20}  {talk.facts.served_model_name}")
        used = f"{talk.num_messages} messages, {talk.count_tokens()} of {talk.facts.max_model_len} tokens"
        print(f"{'conversation':<20}  {used}")
        params = talk.params
        think = next((word for word, value in _WORDS.items() if value == talk.is_thinking), None)
        values = {"system": talk.system, "think": think, "tools": ", ".join(tool.name for tool in talk.tools)}
        for name in _SETTABLE:
            value = values[name] if name in values else getattr(params, name)
            shown = "-" if value in (None, [], "") else value
            print(f"{name:<20}  {shown}{'  (set)' if name in talk.given else ''}")


def read_message() -> Typed:
    """The next line, or the lines between triple quotes. Raises EOFError, KeyboardInterrupt."""
    line = input(">>> ").strip()
    if not line.startswith(_QUOTES):
        return Typed(line, is_quoted=False)
    lines = [line.removeprefix(_QUOTES)]
    while not lines[-1].rstrip().endswith(_QUOTES):
        lines.append(input("... "))
    lines[-1] = lines[-1].rstrip().removesuffix(_QUOTES)
    return Typed("\n".join(lines).strip(), is_quoted=True)


def _parse_value(name: str, text: str) -> Any:
    if not text:
        raise InputError(name, text, f"/set {name} VALUE")
    if text == _DEFAULT:
        return None
    if name == "tools":
        return find_tools(text)
    if name == "think":
        if text not in _WORDS:
            raise InputError(name, text, "yes or no")
        return _WORDS[text]
    kind = _NUMBERS.get(name, str)
    try:
        return kind(text)
    except ValueError:
        raise SamplingParamsError(name, text, "an integer" if kind is int else "a number") from None


def _accept_any_bytes() -> None:
    """Typed bytes that are no UTF-8 become replacement characters instead of an error that ends the chat."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")


def _load_line_editing() -> None:
    """Arrow keys and history at the prompt, where Python was built with them."""
    try:
        import readline
    except ImportError:
        return
    readline.parse_and_bind("tab: self-insert")
