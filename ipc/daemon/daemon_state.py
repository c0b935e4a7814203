"""What a supervisor tells the world: its state, to who asks and in a file, and reports to who started it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Literal

import msgspec

from ..decoding import decode_json
from ..spec.config import EngineConfig
from .daemon_mark import ask_owner
from .private_folder import find_state_folder
from .run_dir import find_named

SUPERVISOR_ROLE = "supervisor"
CLIENT_SOCKET_NAME = "core.sock"
WORKER_SOCKET_NAME = "worker.sock"
JOURNAL_NAME = "deaths.json"
_STATE_NAME = "daemon.json"
_FAILURE_SUFFIX = ".failed.json"

DaemonPhase = Literal["starting", "ready", "restarting", "stopping"]
# "drained": it has nothing to do, and gets nothing; "lost": it was lost too often, and is not started again.
EnginePhase = Literal["starting", "ready", "draining", "drained", "restarting", "lost"]


class SupervisorArgs(msgspec.Struct, frozen=True, kw_only=True):
    """A supervisor's arguments: which daemon it is, and whether it ends with the process that started it."""

    name: str
    config: EngineConfig
    ends_with_parent: bool = False
    listen: str = ""  # tcp://HOST:PORT, where clients of other machines come; '': nowhere
    keys: str = ""  # the folder with the keys for that


class EngineState(msgspec.Struct, kw_only=True):
    """One engine of a daemon as its supervisor sees it."""

    index: int
    socket: str  # of its clients: a name in the run directory
    pid: int | None = None  # of its core
    state: EnginePhase = "starting"
    num_restarts: int = 0
    last_loss: str = ""  # why it was restarted last, or why it is not


class DaemonState(msgspec.Struct, kw_only=True):
    """A daemon as its supervisor sees it."""

    name: str
    model: str
    pid: int  # of the supervisor
    started_at: float  # wall clock
    state: DaemonPhase = "starting"
    num_restarts: int = 0  # of all engines
    core_pid: int | None = None  # of the first engine that has one
    last_loss: str = ""  # why the core was restarted last
    fault_hooks: str = ""  # with which it was started
    engines: list[EngineState] = []
    listen: str = ""  # where clients of other machines come; '': nowhere


class PhaseReport(msgspec.Struct, frozen=True, tag="phase"):
    """A start-up phase has begun."""

    phase: str


class ReadyReport(msgspec.Struct, frozen=True, tag="ready"):
    """Clients are served."""


class FailedReport(msgspec.Struct, frozen=True, tag="failed"):
    """The daemon did not start; `kind` names the error class that fits in the frontend."""

    reason: str
    kind: str = "EngineStartError"


SupervisorReport = PhaseReport | ReadyReport | FailedReport


def make_engine_name(name: str, index: int) -> str:
    """What engine `index` of a daemon calls the file of this name: `core.sock`, then `core1.sock`."""
    stem, suffix = os.path.splitext(name)
    return name if index == 0 else f"{stem}{index}{suffix}"


def write_state(directory: Path, state: DaemonState) -> None:
    """Replace the state file; a reader sees the old one or the new one. Raises OSError and leaves nothing."""
    new = directory / f".{_STATE_NAME}"
    try:
        new.write_bytes(msgspec.json.encode(state))
        os.replace(new, directory / _STATE_NAME)
    except OSError:
        new.unlink(missing_ok=True)
        raise


class DaemonFailure(msgspec.Struct, frozen=True):
    """Why a daemon that was ready has ended by itself; kept beside its log until one of its name starts."""

    name: str
    reason: str


def note_failure(name: str, reason: str) -> None:
    """Note a failure for `read_failures`, if the disk is not full."""
    with contextlib.suppress(OSError):
        _find_failure(name).write_bytes(msgspec.json.encode(DaemonFailure(name, reason)))


def forget_failure(name: str) -> None:
    """Forget the failure: a daemon of this name was started, or is not wanted any more."""
    with contextlib.suppress(OSError):
        _find_failure(name).unlink()


def read_failures() -> list[DaemonFailure]:
    """The failures of this user's daemons, by name."""
    failures: list[DaemonFailure] = []
    for path in sorted(find_state_folder().glob(f"*{_FAILURE_SUFFIX}")):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            failures.append(decode_json(path.read_bytes(), DaemonFailure))
    return failures


def _find_failure(name: str) -> Path:
    return find_state_folder() / f"{find_named(name).name}{_FAILURE_SUFFIX}"


def read_state(directory: Path) -> DaemonState | None:
    """A daemon's answer, or else its state file; None without both."""
    try:
        data = ask_owner(directory) or (directory / _STATE_NAME).read_bytes()
        return decode_json(data, DaemonState)
    except (OSError, msgspec.MsgspecError):
        return None
