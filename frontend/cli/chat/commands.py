"""What begins with a slash at the prompt of `quire chat`. Names and forms are Ollama's where it has them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

import msgspec

from ....ipc.decoding import convert, decode_json
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
Ctrl-C stops an answer. Tab completes commands and parameters' names.
"""
_DEFAULT = "default"  # the value that takes a setting back
_NUMBERS = {field.name: field.kind for field in NUMBERS}
_SAVED = (*_NUMBERS, "stop")
SETTABLE = (*_SAVED, "system", "think")
_WORDS = {"yes": True, "no": False}
_FORMAT = "quire chat"
_MAX_BYTES = 64 * 1024 * 1024


class SavedMessage(TypedDict):
    """A message of a file."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    reasoning_content: NotRequired[str]


class SavedChat(msgspec.Struct, omit_defaults=True):
    """What is saved. `format` says whose file it is."""

    messages: list[SavedMessage]
    model: str = ""
    params: dict[str, Any] = {}
    format: str = ""


def save_chat(name: str, chat: SavedChat) -> Path:
    """Write a conversation. Raises InputError where something else is, or nothing can be."""
    path = Path(name).expanduser()
    try:
        if path.exists() and not _is_ours(path):
            raise InputError("FILE", name, "a new file, or one that /save has written: this is another")
        path.write_bytes(msgspec.json.format(msgspec.json.encode(chat)) + b"\n")
    except OSError as error:
        raise InputError("FILE", name, f"a file that can be written ({error.strerror})") from None
    return path


def load_chat(name: str) -> SavedChat:
    """Read one, or a list of messages. Raises InputError that says what is wrong in it."""
    try:
        with Path(name).expanduser().open("rb") as file:
            body = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise InputError("FILE", name, f"a file that can be read ({error.strerror})") from None
    if len(body) > _MAX_BYTES:
        raise InputError("FILE", name, f"a file of at most {_MAX_BYTES} bytes")
    try:
        if body.lstrip().startswith(b"["):
            return SavedChat(decode_json(body, list[SavedMessage]))
        return decode_json(body, SavedChat)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InputError("FILE", name, f"a conversation as /save writes it ({error})") from None


def _is_ours(path: Path) -> bool:
    try:
        return path.is_file() and load_chat(str(path)).format == _FORMAT
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
            "/retry": lambda _rest: conversation.retry(),
            "/save": self._save,
            "/load": self._load,
            "/clear": self._clear,
            "/reset": self._clear,
        }
        self.words = (*sorted({*self._commands, *LEAVING}), *sorted(SETTABLE))

    def run(self, line: str) -> None:
        """Run a line that begins with a slash. Raises InputError for a value that cannot be used."""
        name, _, rest = line.partition(" ")
        command = self._commands.get(name)
        if command is not None:
            command(rest.strip())
            return
        known = [*self._commands, *LEAVING]
        hint = did_you_mean(name, known) or f", one of {' '.join(known)}"
        print(f"{name}: not a command{hint}; {QUOTES} begins a message with a slash")

    def _help(self, _rest: str) -> None:
        print(HELP, end="")

    def _clear(self, _rest: str) -> None:
        self._conversation.reset()
        print("forgotten")

    def _save(self, rest: str) -> None:
        chat = self._conversation
        if not chat.num_messages:
            raise InputError("/save", rest, "after a question: there is nothing to save")
        params = {name: value for name, value in chat.sampling.items() if name in _SAVED}
        messages = convert(chat.messages, list[SavedMessage])
        saved = SavedChat(messages, chat.facts.served_model_name, params, _FORMAT)
        print(f"{save_chat(_need_file('/save', rest), saved)}: {chat.num_messages} messages")

    def _load(self, rest: str) -> None:
        saved = load_chat(_need_file("/load", rest))
        chat, before = self._conversation, self._conversation.sampling
        try:
            for name, value in saved.params.items():
                if name not in _SAVED:
                    raise InputError("params", name, f"one of {', '.join(_SAVED)}")
                chat.set_field(name, value)
            chat.replace([dict(message) for message in saved.messages])
        except InputError:
            chat.sampling = before
            raise
        print(f"{rest}: {chat.num_messages} messages, {chat.count_tokens()} tokens")

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
        if name not in SETTABLE:
            raise InputError("set", name, f"one of {', '.join(SETTABLE)}{did_you_mean(name, SETTABLE)}")
        value = _parse_value(name, text.strip())
        match name:
            case "system":
                self._conversation.system = value
            case "think":
                self._conversation.is_thinking = value
            case _:
                self._conversation.set_field(name, value)

    def _show(self, _rest: str) -> None:
        chat, params = self._conversation, self._conversation.params
        print(f"{'model':<20}  {chat.facts.served_model_name}")
        used = f"{chat.num_messages} messages, {chat.count_tokens()} of {chat.facts.max_model_len} tokens"
        print(f"{'conversation':<20}  {used}")
        think = next((word for word, value in _WORDS.items() if value == chat.is_thinking), None)
        for name in SETTABLE:
            value = {"system": chat.system, "think": think}.get(name, getattr(params, name, None))
            shown = "-" if value in (None, [], "") else value
            print(f"{name:<20}  {shown}{'  (set)' if name in chat.sampling else ''}")


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
