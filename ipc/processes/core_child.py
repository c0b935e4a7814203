"""CoreChild: the place of an engine core, for its owner: a supervisor or the client of a private engine."""

from __future__ import annotations

import time

import msgspec

from ..config import EngineConfig
from ..daemon.daemon_state import CLIENT_SOCKET_NAME, JOURNAL_NAME, WORKER_SOCKET_NAME
from ..daemon.run_dir import RunDirectory
from .child_args import CoreArgs
from .liveness import ChildWatch
from .managed_child import ManagedChild
from .process import ChildProcess

STOP_GRACE_S = 1.5  # what a core gets to end itself and its worker before it is killed


class CoreChild(ManagedChild[ChildProcess]):
    """One core after the other in `run_dir`; those that replace a lost one have the config for that."""

    def __init__(self, run_dir: RunDirectory, config: EngineConfig, module: str) -> None:
        """`module` is what is run: child_args.py's CORE_MODULE."""
        self._module = module
        self._args = CoreArgs(
            client_address=run_dir.address_of(CLIENT_SOCKET_NAME),
            worker_address=run_dir.address_of(WORKER_SOCKET_NAME),
            config=config,
            journal_path=str(run_dir.path / JOURNAL_NAME),
        )
        self.address = self._args.client_address
        self.is_watched = config.watches_core  # else its owner leaves it alone, for debuggers
        super().__init__(self._start_core, config.recovery.make_core_losses(self._args.journal_path))

    def start(self) -> ChildWatch:
        """As of every place. The core is to listen soon, if it is watched."""
        watch = super().start()
        if self.is_watched:
            watch.expect_listening(time.monotonic())
        return watch

    def _start_core(self) -> ChildProcess:
        args = self._args
        self._args = msgspec.structs.replace(args, config=args.config.for_replacement())
        return ChildProcess.start(self._module, "engine-core", msgspec.msgpack.encode(args))
