"""What a child process is started with, written into its standard input before any socket exists."""

from __future__ import annotations

import msgspec

from ..network.keys import ClientKeys, ServerKeys
from ..protocol.messages import EngineRoster
from ..spec.config import EngineConfig

CORE_MODULE = "quire.core"
WORKER_MODULE = "quire.worker"
SPARE_ROLE = "spare-worker"


class NetworkArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Where a core listens for clients from other machines."""

    listening_fd: int  # which the core inherits
    keys: str  # the folder that says which clients are let in
    server: ServerKeys  # the daemon's own, as they were when it read them


class CoreArgs(msgspec.Struct, frozen=True, kw_only=True):
    """An engine core: where to listen for clients and for its worker, and what to run."""

    client_address: str
    worker_address: str
    config: EngineConfig
    journal_path: str = ""  # where one core tells the next what ran when it died
    engine_index: int = 0
    roster: EngineRoster | None = None  # of the group that it belongs to; None: there is no other engine
    owner_identity: bytes = b""  # of the supervisor's socket, from which rosters come; empty: there is none
    network: NetworkArgs | None = None  # None: only this machine's clients come


class WorkerArgs(msgspec.Struct, frozen=True, kw_only=True):
    """A worker: where the core listens, who it is, what to load.

    `group_path` leads to a descriptor that it was started with: of the file, without a name in any folder,
    through which the ranks of `config.parallel` share memory. Empty: it has the whole model.
    """

    address: str
    rank: int
    config: EngineConfig
    group_path: str = ""
    keys: ClientKeys | None = None  # of an address on another machine

    @property
    def speaks(self) -> bool:
        """Whether the core hears of steps from this worker."""
        return self.rank == self.config.parallel.speaker
