"""Folders that only this user may enter: who can write there can speak to the engine."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ..errors import ConfigError, EngineStartError


def find_state_folder() -> Path:
    """Where this user's logs and histories are kept, which stay when a program has ended."""
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(home) / "quire"


def make_folder(path: Path) -> None:
    """Make it with mode 0700 if there is nothing. Raises EngineStartError if it cannot be made."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise EngineStartError(f"the run directory {path} cannot be made: {error.strerror}") from error


def make_private_folder(path: Path) -> None:
    """As `make_folder`. Raises ConfigError if somebody else owns it or others may enter it."""
    if not path.is_symlink():
        make_folder(path)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError("run directory", str(path), "a folder of this user with mode 0700")


def make_socket_folder(socket_path: Path) -> None:
    """Make a socket's folder, in a private one, again if something has removed them. Raises as above."""
    if not socket_path.parent.exists():
        make_private_folder(socket_path.parent.parent)
        make_folder(socket_path.parent)
