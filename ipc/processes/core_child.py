"""CoreChild: the place of an engine core, for its owner: a supervisor or the client of a private engine."""

from __future__ import annotations

import contextlib
import os
import secrets
import time

import msgspec

from ..config import EngineConfig
from ..daemon.daemon_state import CLIENT_SOCKET_NAME, JOURNAL_NAME, WORKER_SOCKET_NAME, make_engine_name
from ..daemon.run_dir import RunDirectory
from ..messages import EngineRoster
from ..sockets import IDENTITY_BYTES
from .child_args import CoreArgs, NetworkArgs
from .liveness import ChildWatch
from .managed_child import ManagedChild
from .process import ChildProcess

STOP_GRACE_S = 1.5  # what a core gets to end itself and its worker before it is killed


class CoreChild(ManagedChild[ChildProcess]):
    """One core after the other in `run_dir`; those that replace a lost one have the config for that."""

    def __init__(
        self,
        run_dir: RunDirectory,
        config: EngineConfig,
        module: str,
        index: int = 0,
        network: NetworkArgs | None = None,
    ) -> None:
        """`module` is what is run: child_args.py's CORE_MODULE. `index` is of the engine in its group."""
        self._module = module
        self.owner_identity = b"s" + secrets.token_bytes(IDENTITY_BYTES - 1)
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
        self.is_watched = config.watches_core  # else its owner leaves it alone, for debuggers
        super().__init__(self._start_core, config.recovery.make_core_losses(self._args.journal_path))

    def start(self) -> ChildWatch:
        """As of every place. The core is to listen soon, if it is watched."""
        watch = super().start()
        if self.is_watched:
            watch.expect_listening(time.monotonic())
        return watch

    def set_roster(self, roster: EngineRoster | None) -> None:
        """What the next core is started with; one that runs is told by its owner."""
        self._args = msgspec.structs.replace(self._args, roster=roster)

    def set_share(self, rank: int, num_engines: int) -> None:
        """The next core and its worker have one share in so many of the machine."""
        config = self._args.config.for_engine(rank, num_engines)
        self._args = msgspec.structs.replace(self._args, config=config)

    def set_network(self, network: NetworkArgs) -> None:
        """What the next core is started with."""
        self._args = msgspec.structs.replace(self._args, network=network)

    def remove_socket(self) -> None:
        """Take away what a core that was killed has left: there will be none at this address."""
        with contextlib.suppress(OSError):
            os.unlink(self.address.removeprefix("ipc://"))

    def _start_core(self) -> ChildProcess:
        args = self._args
        self._args = msgspec.structs.replace(args, config=args.config.for_replacement())
        fds = () if args.network is None else (args.network.listening_fd,)
        return ChildProcess.start(self._module, "engine-core", msgspec.msgpack.encode(args), pass_fds=fds)
