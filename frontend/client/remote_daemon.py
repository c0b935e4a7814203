"""A daemon on another machine: how it is named, what this machine must have of it, and its Engine."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from ...ipc.errors import ConfigError
from ...ipc.files.file_identity import note_model
from ...ipc.network.keys import read_client_keys
from ...ipc.network.served_files import ServedFiles, check_copy
from ...ipc.network.tcp_address import is_tcp, parse_tcp_address
from ...ipc.processes.liveness import ChildWatch
from ...ipc.protocol.messages import EngineFacts, RosterEntry
from ..models.model_files import POCKET
from .engines import AttachedEngine, Engine, find_engines
from .handshake_watch import HandshakeWatch

_log = logging.getLogger(__name__)

_SEARCHED_BESIDE = 8  # ports below and above that of an engine that is gone
_NOT_GIVEN = "not given with attach: the daemon's engine has its own"


class RemoteDaemon(msgspec.Struct, frozen=True):
    """A daemon's address, the folder of this client's keys, and where this machine has copies of what
    frontends read of its model. model '': only to look at it.
    """

    address: str
    keys: str
    model: str = ""
    tokenizer: str = ""

    def __str__(self) -> str:
        return self.address

    def __repr__(self) -> str:
        return repr(self.address)


Attachment = str | RemoteDaemon  # a daemon's name on this machine, or one of another machine


def choose_attachment(
    attach: Attachment,
    keys: str | os.PathLike[str] | None = None,
    model: str | os.PathLike[str] | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    *,
    looks_only: bool = False,
) -> Attachment:
    """The daemon that a caller's arguments name. Raises ConfigError or ModelError.

    Of a daemon on another machine the keys are checked, and the copy of its model (by default the pocket
    model) is found, which is needed unless the caller only looks.
    """
    if isinstance(attach, RemoteDaemon):
        return attach
    if not is_tcp(attach):
        check_unattached(keys=keys)
        for name, value in (("model", model), ("tokenizer", tokenizer)):
            if value is not None:
                raise ConfigError(name, value, _NOT_GIVEN)
        return attach
    address = str(parse_tcp_address("attach", attach))
    if keys is None:
        files = "client.secret and server.public"
        raise ConfigError("keys", None, f"a folder with {files} for attach={attach!r} (see `quire keys`)")
    folder = Path(keys)
    read_client_keys(folder)
    if looks_only:
        return RemoteDaemon(address, str(folder.absolute()))
    return RemoteDaemon(address, str(folder.absolute()), *_find_copies(model, tokenizer))


def _find_copies(
    model: str | os.PathLike[str] | None, tokenizer: str | os.PathLike[str] | None
) -> tuple[str, str]:
    from ..models.model_folder import find_model_folder
    from ..models.sentence_transformers import find_transformer_folder
    from ..models.vocabulary_files import find_tokenizer_folder

    root = find_model_folder(os.fspath(model or tokenizer or POCKET))
    if tokenizer is None:
        return str(root), str(find_tokenizer_folder(find_transformer_folder(root)))
    folder = find_model_folder(os.fspath(tokenizer), field_name="tokenizer")
    return str(root), str(find_tokenizer_folder(folder))


class RemoteEngine(AttachedEngine):
    """An engine of it. Only the connection tells how it is."""

    is_computing = True  # for all that is known here: it may be late with an answer
    is_stopped = False

    def __init__(
        self, daemon: RemoteDaemon, index: int = 0, handshakes: HandshakeWatch | None = None
    ) -> None:
        """Raises ConfigError for keys that cannot be used, or a host that is not known. Without `handshakes`
        this may wait for a name server.
        """
        super().__init__(index)
        self.address = daemon.address
        self.keys = read_client_keys(Path(daemon.keys))
        self._daemon = daemon
        self.handshakes = handshakes or HandshakeWatch(self.address)
        self.watch = ChildWatch(self)
        self._reconnect: Callable[[], None] = lambda: None
        self._seen: set[int] = set()  # what `find_siblings` has returned
        self._checked: ServedFiles | None = None  # what the copies were found equal to
        self.exit_fd = os.eventfd(0, os.EFD_CLOEXEC)  # never readable: its end cannot be seen from here

    @property
    def cpu_time_s(self) -> float:
        """Nothing is known that would have kept it from computing."""
        return time.monotonic()

    def dump_stacks(self) -> None:
        """Nothing of it can be reached from here."""

    def kill(self, because: str) -> None:
        """Make another connection: the process is out of reach."""
        _log.warning("%s: %s; connecting again", self.address, because)
        self._reconnect()

    def on_silence(self, reconnect: Callable[[], None]) -> None:
        self._reconnect = reconnect

    def describe_end(self) -> str | None:
        return None

    def make_sibling(self, entry: RosterEntry) -> Engine:
        """Engines of a daemon have ports in a row."""
        address = parse_tcp_address("attach", self.address).shift(entry.index - self.index)
        daemon = msgspec.structs.replace(self._daemon, address=str(address))
        assert self.handshakes is not None
        return RemoteEngine(daemon, entry.index, self.handshakes.make_sibling(daemon.address))

    def find_siblings(self) -> list[RosterEntry]:
        """Those at whose ports somebody has listened since the last call, each once: who listens there may be
        no engine of this daemon, which its handshake shows.
        """
        assert self.handshakes is not None
        place = parse_tcp_address("attach", self.address)
        indexes = range(max(0, self.index - _SEARCHED_BESIDE), self.index + _SEARCHED_BESIDE + 1)
        ports = [place.port + index - self.index for index in indexes if index not in self._seen]
        open_ports = self.handshakes.find_open_ports(port for port in ports if 0 < port < 65536)
        listening = {self.index + port - place.port for port in open_ports}
        self._seen |= listening
        return [RosterEntry(index, "") for index in sorted(listening)]

    def note_index(self, index: int) -> None:
        self.index = index

    def check_facts(self, facts: EngineFacts) -> EngineFacts:
        """With this machine's copies in the place of the engine's files. Raises ModelError if they differ."""
        daemon = self._daemon
        if not daemon.model:
            return msgspec.structs.replace(facts, tokenizer="", noted=None)
        if facts.files is not None and facts.files != self._checked:
            check_copy(facts.files, daemon.model, daemon.tokenizer)
            self._checked = facts.files
        tokenizer = daemon.tokenizer if facts.tokenizer else ""
        noted = note_model(daemon.model, tokenizer, ())
        return msgspec.structs.replace(facts, model=daemon.model, tokenizer=tokenizer, noted=noted)

    def measure_startup(self, facts: EngineFacts) -> list[tuple[str, float]]:  # noqa: ARG002
        """The other machine's clock counts for nothing."""
        return [("attach", time.time() - self.started_at)]


def check_unattached(**options: object) -> None:
    """Raise ConfigError for what is only for a daemon of another machine."""
    for name, value in options.items():
        if value is not None:
            raise ConfigError(name, value, "only with attach='tcp://HOST:PORT'")


def find_daemon_engines(daemon: Attachment) -> list[Engine]:
    """The engines of a running daemon; of one on another machine one, which says who else there is.

    Raises ConfigError, or DaemonError if none of its name runs here.
    """
    return find_engines(daemon) if isinstance(daemon, str) else [RemoteEngine(daemon)]
