"""What a supervisor tells the world: its state, to who asks and in a file, and reports to who started it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import msgspec

from ..config import EngineConfig
from .daemon_mark import ask_owner

SUPERVISOR_ROLE = "supervisor"
CLIENT_SOCKET_NAME = "core.sock"
WORKER_SOCKET_NAME = "worker.sock"
JOURNAL_NAME = "deaths.json"
_STATE_NAME = "daemon.json"

DaemonPhase = Literal["starting", "ready", "restarting", "stopping"]


class SupervisorArgs(msgspec.Struct, frozen=True, kw_only=True):
    """A supervisor: which daemon to be, and whether it ends with the process that started it."""

    name: str
    config: EngineConfig
    ends_with_parent: bool = False


class DaemonState(msgspec.Struct, kw_only=True):
    """A daemon as its supervisor sees it."""

    name: str
    model: str
    pid: int  # of the supervisor
    started_at: float  # wall clock
    state: DaemonPhase = "starting"
    num_restarts: int = 0
    core_pid: int | None = None
    last_loss: str = ""  # why the core was restarted last
    fault_hooks: str = ""  # with which it was started


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


def write_state(directory: Path, state: DaemonState) -> None:
    """Replace the state file; a reader sees the old one or the new one. Raises OSError and leaves nothing."""
    new = directory / f".{_STATE_NAME}"
    try:
        new.write_bytes(msgspec.json.encode(state))
        os.replace(new, directory / _STATE_NAME)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def read_state(directory: Path) -> DaemonState | None:
    """What a daemon says of itself; if it cannot be asked, its state file. None without either."""
    try:
        data = ask_owner(directory) or (directory / _STATE_NAME).read_bytes()
        return msgspec.json.decode(data, type=DaemonState)
    except (OSError, msgspec.MsgspecError):
        return None
