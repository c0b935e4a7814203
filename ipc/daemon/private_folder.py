"""Folders that only this user may enter: who can write there can speak to the engine."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ..errors import ConfigError, EngineStartError


def find_state_folder() -> Path:
    """The folder of this user's logs and histories, which outlive a program."""
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(home) / "quire"


def make_folder(path: Path) -> None:
    """Make it with mode 0700 if there is nothing. Raises EngineStartError if it cannot be made."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise EngineStartError(f"the run directory {path} cannot be made: {error.strerror}") from error


def make_private_folder(path: Path) -> None:
    """As `make_folder`. Raises ConfigError if it is not this user's, or others may enter it."""
    if not path.is_symlink():
        make_folder(path)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError("run directory", str(path), "a folder of this user with mode 0700")


def make_socket_folder(socket_path: Path) -> None:
    """Make a socket's folder and its private parent, if they were removed. Raises as above."""
    if not socket_path.parent.exists():
        make_private_folder(socket_path.parent.parent)
        make_folder(socket_path.parent)
