"""ManagedChild: starts, watches and replaces one child process after another, for every owner of processes.

It reads no clock, waits for nothing and does not know what the process does: its owner passes the time in,
tells `watch` of messages, and says that the process has ended. CoreChild adds an engine core's arguments.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from ..daemon.daemon_state import CLIENT_SOCKET_NAME, JOURNAL_NAME, WORKER_SOCKET_NAME, make_engine_name
from ..daemon.run_dir import RunDirectory
from ..protocol.messages import EngineRoster
from ..protocol.sockets import IDENTITY_BYTES
from ..spec.config import EngineConfig
from .child_args import CoreArgs, NetworkArgs
from .liveness import ChildWatch
from .process import ChildProcess, ProcessHandle
from .restarts import RestartBudget

_log = logging.getLogger(__name__)


P = TypeVar("P", bound=ProcessHandle)


class ManagedChild(Generic[P]):
    """One process at a time. Times are of the monotonic clock.

    `process` and its `watch` are None before the first start and after `stop`; `start_at` is when the next
    process is due, None if none is.
    """

    def __init__(self, start_process: Callable[[], P], budget: RestartBudget | None = None) -> None:
        """Without a `budget` the owner counts the losses."""
        self._start_process = start_process
        self._budget = budget
        self.process: P | None = None
        self.watch: ChildWatch | None = None
        self.start_at: float | None = None
        self.end_reason: str | None = None  # why there will be no other process, if `replace` returned False

    @property
    def next_check_at(self) -> float | None:
        """When `is_due` or the watch's `look` is due; None if never."""
        return self.start_at if self.watch is None else self.watch.next_check_at

    def is_due(self, now: float) -> bool:
        """Whether a process is to be started now."""
        return self.start_at is not None and now >= self.start_at

    def start(self) -> ChildWatch:
        """Start a process in place of the last one, and watch it. Raises as `start_process`."""
        if self.process is not None:
            self.process.stop(0.0)
        process = self._start_process()
        self.process, self.watch, self.start_at = process, ChildWatch(process), None
        return self.watch

    def stop(self, grace_s: float) -> str:
        """End the process, with SIGKILL after `grace_s`. Returns how it has ended. Idempotent."""
        process, self.process, self.watch = self.process, None, None
        if process is None:
            return ""
        process.stop(grace_s)
        return process.describe_exit()

    def replace(self, reason: str, now: float) -> bool:
        """The process was lost: another is due at `start_at`. False: it was lost too often (`end_reason`)."""
        assert self._budget is not None
        after_s = self._budget.note_loss(now)
        if after_s is None:
            self.end_reason = f"{reason}, {self._budget.excess}"
            return False
        _log.error("%s; starting another", reason)
        self.start_at = now + after_s
        return True

    def forgive(self) -> None:
        """Forget all losses: an operator asks for another process."""
        assert self._budget is not None
        self._budget.forgive()
        self.end_reason = None


STOP_GRACE_S = 1.5  # what a core gets to end itself and its worker before it is killed


class CoreChild(ManagedChild[ChildProcess]):
    """One core after another in `run_dir`; from the second on with `EngineConfig.for_replacement`."""

    def __init__(
        self,
        run_dir: RunDirectory,
        config: EngineConfig,
        module: str,
        index: int = 0,
        network: NetworkArgs | None = None,
        *,
        is_supervised: bool = False,
    ) -> None:
        """`module`: child_args.py's CORE_MODULE. `index`: the engine's number in its group. `is_supervised`:
        its owner is a client with the identity `owner_identity`.
        """
        self._module = module
        self.owner_identity = b"s" + secrets.token_bytes(IDENTITY_BYTES - 1) if is_supervised else b""
        self._args = CoreArgs(
            client_address=run_dir.address_of(make_engine_name(CLIENT_SOCKET_NAME, index)),
            worker_address=run_dir.address_of(make_engine_name(WORKER_SOCKET_NAME, index)),
            config=config,
            journal_path=str(run_dir.path / make_engine_name(JOURNAL_NAME, index)),
            engine_index=index,
            owner_identity=self.owner_identity,
            network=network,
        )
        self.address = self._args.client_address
        self.is_watched = config.watches_core  # False for debuggers
        super().__init__(self._start_core, config.recovery.make_core_budget(self._args.journal_path))

    def start(self) -> ChildWatch:
        """As ManagedChild.start. A core that is watched has to listen soon."""
        watch = super().start()
        if self.is_watched:
            watch.expect_listening(time.monotonic())
        return watch

    def set_roster(self, roster: EngineRoster | None) -> None:
        """Set the next core's roster; the owner sends it to one that runs."""
        self._args = msgspec.structs.replace(self._args, roster=roster)

    def set_share(self, rank: int, num_engines: int) -> None:
        """Set the share of the machine that the next core and its worker get."""
        config = self._args.config.for_engine(rank, num_engines)
        self._args = msgspec.structs.replace(self._args, config=config)

    def set_network(self, network: NetworkArgs) -> None:
        """Set where the next core listens for remote clients."""
        self._args = msgspec.structs.replace(self._args, network=network)

    def remove_socket(self) -> None:
        """Remove the socket file that a killed core has left, as no other core comes."""
        with contextlib.suppress(OSError):
            os.unlink(self.address.removeprefix("ipc://"))

    def _start_core(self) -> ChildProcess:
        args = self._args
        self._args = msgspec.structs.replace(args, config=args.config.for_replacement())
        fds = () if args.network is None else (args.network.listening_fd,)
        return ChildProcess.start(self._module, "engine-core", msgspec.msgpack.encode(args), pass_fds=fds)
