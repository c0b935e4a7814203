"""A conversation in a file: JSON with the fields of a chat request, so that it can be sent elsewhere too."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ....ipc.errors import InputError

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
