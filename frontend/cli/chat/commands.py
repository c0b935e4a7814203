"""What begins with a slash at the prompt of `quire chat`. Names and forms are Ollama's where it has them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ....ipc.errors import InputError, SamplingParamsError, did_you_mean
from ..sampling_options import NUMBERS
from .conversation import Conversation
from .line_editor import QUOTES

LEAVING = ("/bye", "/exit", "/quit")
HELP = f"""\
/help, /?             this text
/set NAME VALUE       set a sampling parameter, or one of these:
/set system TEXT      the system message; /system TEXT is the same
/set think yes        have the model think first, or not: no
/set NAME default     take it back
/set, /show           show the model, the conversation's size and what is set
/retry                ask the last question again
/save FILE            write the conversation and what is set to a file
/load FILE            go on with the conversation in a file
/clear, /reset        forget the conversation
/bye, /exit           leave (Ctrl-D too)
\\ at the end          goes on with the message in the next line
{QUOTES}                   begin and end a message of several lines
Ctrl-C stops an answer. Tab completes commands.
"""
_DEFAULT = "default"  # the value that takes a setting back
_NUMBERS = {field.name: field.kind for field in NUMBERS}
_SETTABLE = (*_NUMBERS, "stop", "system", "think")
_WORDS = {"yes": True, "no": False}
_FORMAT = "quire chat"
_MAX_BYTES = 64 * 1024 * 1024
_ROLES = ("system", "user", "assistant", "tool")


class SavedChat(msgspec.Struct, omit_defaults=True):
    """What is saved. `format` says whose file it is."""

    messages: list[dict[str, Any]]
    model: str = ""
    params: dict[str, Any] = {}
    format: str = ""


def save_chat(name: str, model: str, messages: Sequence[dict[str, Any]], params: dict[str, Any]) -> Path:
    """Write a conversation. Raises InputError where something else is, or nothing can be."""
    path = Path(os.path.expanduser(name))
    saved = SavedChat(list(messages), model, params, _FORMAT)
    body = msgspec.json.format(msgspec.json.encode(saved)) + b"\n"
    new = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        if path.exists() and not _is_ours(path):
            raise InputError("FILE", name, "a new file, or one that /save has written: this is another")
        new.write_bytes(body)
        os.replace(new, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            new.unlink()
        raise InputError("FILE", name, f"a file that can be written ({error.strerror})") from None
    return path


def load_chat(name: str) -> SavedChat:
    """Read one, or a list of messages. Raises InputError that says what is wrong in it."""
    path = Path(os.path.expanduser(name))
    try:
        with path.open("rb") as file:
            body = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise InputError("FILE", name, f"a file that can be read ({error.strerror})") from None
    if len(body) > _MAX_BYTES:
        raise InputError("FILE", name, f"a file of at most {_MAX_BYTES} bytes")
    try:
        is_list = body.lstrip().startswith(b"[")
        saved = (
            SavedChat(msgspec.json.decode(body, type=list[dict[str, Any]]))
            if is_list
            else msgspec.json.decode(body, type=SavedChat)
        )
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InputError("FILE", name, f"a conversation as /save writes it ({error})") from None
    for number, message in enumerate(saved.messages):
        _check_message(f"messages[{number}]", message)
    return saved


def _check_message(place: str, message: dict[str, Any]) -> None:
    if message.get("role") not in _ROLES:
        raise InputError(f"{place}.role", message.get("role"), f"one of {', '.join(_ROLES)}")
    if not isinstance(message.get("content"), str):
        raise InputError(f"{place}.content", message.get("content"), "a text")


def _is_ours(path: Path) -> bool:
    if not path.is_file():
        return False
    try:
        return load_chat(str(path)).format == _FORMAT
    except InputError:
        return False


class Commands:
    """Runs them on one conversation. What they say goes to standard output."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": self._help,
            "/?": self._help,
            "/set": self._set,
            "/system": self._set_system,
            "/show": self._show,
            "/retry": self._retry,
            "/save": self._save,
            "/load": self._load,
            "/clear": self._clear,
            "/reset": self._clear,
        }

    def run(self, line: str) -> None:
        """Run a line that begins with a slash. Raises InputError for a value that cannot be used."""
        name, _, rest = line.partition(" ")
        command = self._commands.get(name)
        if command is None:
            known = [*self._commands, *LEAVING]
            hint = did_you_mean(name, known) or f", one of {' '.join(known)}"
            print(f"{name}: not a command{hint}; {QUOTES} begins a message with a slash")
            return
        command(rest.strip())

    def complete(self, line: str) -> Sequence[str]:
        """Words that may stand in the place of the last of a line that begins with a slash."""
        match line.split(" "):
            case [_]:
                return sorted({*self._commands, *LEAVING})
            case ["/set", *given]:
                return _complete_setting([word for word in given[:-1] if word != "parameter"])
            case ["/save" | "/load", word]:
                return _list_files(word)
            case _:
                return ()

    def _help(self, _rest: str) -> None:
        print(HELP, end="")

    def _clear(self, _rest: str) -> None:
        self._conversation.reset()
        print("forgotten")

    def _retry(self, _rest: str) -> None:
        self._conversation.retry()

    def _save(self, rest: str) -> None:
        talk = self._conversation
        if not talk.num_messages:
            raise InputError("/save", rest, "after a question: there is nothing to save")
        params = {name: value for name, value in talk.given.items() if name in _SETTABLE}
        path = save_chat(_need_file("/save", rest), talk.facts.served_model_name, talk.messages, params)
        print(f"{path}: {talk.num_messages} messages")

    def _load(self, rest: str) -> None:
        saved = load_chat(_need_file("/load", rest))
        talk, before = self._conversation, self._conversation.given
        try:
            for name, value in saved.params.items():
                if name not in (*_NUMBERS, "stop"):
                    raise InputError("params", name, f"one of {', '.join((*_NUMBERS, 'stop'))}")
                talk.set_field(name, value)
            talk.replace(saved.messages)
        except InputError:
            talk.given = before
            raise
        print(f"{rest}: {talk.num_messages} messages, {talk.count_tokens()} tokens")

    def _set_system(self, rest: str) -> None:
        if rest:
            self._set(f"system {rest}")
        else:
            print(self._conversation.system or "no system message; /system TEXT sets one")

    def _set(self, rest: str) -> None:
        name, _, text = rest.removeprefix("parameter ").partition(" ")
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
            case _:
                self._conversation.set_field(name, value)

    def _show(self, _rest: str) -> None:
        talk = self._conversation
        print(f"{'model':<20}  {talk.facts.served_model_name}")
        used = f"{talk.num_messages} messages, {talk.count_tokens()} of {talk.facts.max_model_len} tokens"
        print(f"{'conversation':<20}  {used}")
        params = talk.params
        think = next((word for word, value in _WORDS.items() if value == talk.is_thinking), None)
        values = {"system": talk.system, "think": think}
        for name in _SETTABLE:
            value = values[name] if name in values else getattr(params, name)
            shown = "-" if value in (None, [], "") else value
            print(f"{name:<20}  {shown}{'  (set)' if name in talk.given else ''}")


def _parse_value(name: str, text: str) -> Any:
    if not text:
        raise InputError(name, text, f"/set {name} VALUE")
    if text == _DEFAULT:
        return None
    if name == "think":
        if text not in _WORDS:
            raise InputError(name, text, "yes or no")
        return _WORDS[text]
    if name == "system":
        return text.removeprefix(QUOTES).removesuffix(QUOTES).strip()
    kind = _NUMBERS.get(name, str)
    try:
        return kind(text)
    except ValueError:
        raise SamplingParamsError(name, text, "an integer" if kind is int else "a number") from None


def _need_file(command: str, rest: str) -> str:
    if not rest:
        raise InputError(command, rest, f"{command} FILE")
    return rest


def _complete_setting(given: list[str]) -> Sequence[str]:
    """What may follow `/set` and these words."""
    match given:
        case []:
            return sorted(_SETTABLE)
        case ["think"]:
            return (*_WORDS, _DEFAULT)
        case [_]:
            return (_DEFAULT,)
        case _:
            return ()


def _list_files(beginning: str) -> Sequence[str]:
    """Files whose names begin so; folders with the sign that goes on."""
    folder = Path(os.path.expanduser(os.path.dirname(beginning) or "."))
    start = beginning[: len(beginning) - len(os.path.basename(beginning))]
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return ()
    return [f"{start}{entry.name}{'/' if entry.is_dir() else ''}" for entry in entries]
