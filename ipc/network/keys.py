"""CURVE keys in files: a daemon's own for its remote clients, and those of the clients that it lets in.

A daemon's folder has `server.secret` and `clients` (the public keys of its clients, one a line), a client's
folder `client.secret` and `server.public`. A line is a key of 40 characters (Z85), which a name or a remark
that begins with '# ' may follow. A client's line may also have `weight=W` (its share beside other clients';
1), `priority=P` (the least value that its requests may have; 0) and `tenants=own` (each tenant that it names
has its own share, for a server with users of its own). Nothing here knows sockets.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import zmq

from ..errors import ConfigError
from ..protocol.fair_share import MAX_CLIENT_WEIGHT

SERVER_SECRET, SERVER_PUBLIC = "server.secret", "server.public"
CLIENT_SECRET, CLIENT_PUBLIC = "client.secret", "client.public"
CLIENTS = "clients"
_MAKE_HINT = "`quire keys make` makes one"
KEY_LENGTH = 40
_KEY = re.compile(rb"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_MAX_FILE_BYTES = 1 << 20  # some 20,000 clients
_LOOK_INTERVAL_S = 0.01  # who floods makes some 10,000 messages a second


_GRANT_WORDS = f"weight=W (above 0, up to {MAX_CLIENT_WEIGHT:g}), priority=P (an integer) or tenants=own"


class ClientGrant(msgspec.Struct, frozen=True):
    """What the operator grants a client that is let in."""

    name: str = ""
    weight: float = 1.0
    priority: int = 0
    may_name_tenants: bool = False


class ServerKeys(msgspec.Struct, frozen=True):
    """A daemon's own pair."""

    public: bytes
    secret: bytes


class ClientKeys(msgspec.Struct, frozen=True):
    """A client's pair, and the public key of its daemon."""

    public: bytes
    secret: bytes
    server: bytes


def make_keys(folder: Path) -> None:
    """Make a daemon's keys and those of a first client. Raises ConfigError if there are keys already."""
    _check_curve()
    with _readable_errors(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any((folder / name).exists() for name in (SERVER_SECRET, CLIENT_SECRET, CLIENTS)):
            raise ConfigError("keys", str(folder), "a folder without keys: what is there is not overwritten")
        server, client = zmq.curve_keypair(), zmq.curve_keypair()
        _write_pair(folder, (SERVER_PUBLIC, SERVER_SECRET), server)
        _write_pair(folder, (CLIENT_PUBLIC, CLIENT_SECRET), client)
        text = b"# Public keys of the clients that are let in, a line each: KEY NAME\n"
        _write(folder / CLIENTS, text + client[0] + b" client\n", 0o600)


def add_client(folder: Path, client_folder: Path, weight: float = 1.0) -> None:
    """Let one more client in, and make its folder, to be moved to its machine. Raises ConfigError."""
    _check_curve()
    if _read_weight(str(weight)) is None:
        raise ConfigError("weight", weight, f"above 0, up to {MAX_CLIENT_WEIGHT:g}")
    server = read_server_keys(folder).public
    name = client_folder.name
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise ConfigError("folder", str(client_folder), "a folder named with letters, digits and ._-")
    with _readable_errors(client_folder):
        client_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(client_folder.iterdir()):
            raise ConfigError("folder", str(client_folder), "a folder that is empty, or is not there yet")
        client = zmq.curve_keypair()
        _write_pair(client_folder, (CLIENT_PUBLIC, CLIENT_SECRET), client)
        _write(client_folder / SERVER_PUBLIC, server + b"\n", 0o644)
        with (folder / CLIENTS).open("ab+") as clients:
            clients.seek(0)
            start = b"" if clients.read().endswith(b"\n") else b"\n"  # else it would join the last name
            words = name if weight == 1.0 else f"{name} weight={weight:g}"
            clients.write(start + client[0] + b" " + words.encode() + b"\n")


def read_server_keys(folder: Path) -> ServerKeys:
    """A daemon's. Raises ConfigError naming the file; a secret that others can read is refused."""
    _check_curve()
    secret = _read_secret(folder / SERVER_SECRET)
    AuthorizedClients(folder).check()
    return ServerKeys(zmq.curve_public(secret), secret)


def read_client_keys(folder: Path) -> ClientKeys:
    """A client's. Raises as `read_server_keys`."""
    _check_curve()
    secret = _read_secret(folder / CLIENT_SECRET)
    server = _read_one_key(folder / SERVER_PUBLIC)
    return ClientKeys(zmq.curve_public(secret), secret, server)


def make_key_pairs() -> tuple[ServerKeys, ClientKeys]:
    """A server's keys and its only client's, for who starts both. Raises ConfigError without CURVE."""
    _check_curve()
    server, client = zmq.curve_keypair(), zmq.curve_keypair()
    return ServerKeys(*server), ClientKeys(*client, server=server[0])


class AuthorizedClients:
    """The clients in a daemon's file, which is read again when it has changed. For any thread."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = folder / CLIENTS
        self._clock = clock
        self._grants: dict[bytes, ClientGrant] = {}
        self._version: object = None
        self._look_at = -math.inf
        self._lock = threading.Lock()

    def find_grant(self, key: bytes) -> ClientGrant | None:
        """The grant to the client with this public key of 40 characters; None: it is not let in.

        No client is let in while the file is missing or cannot be used. A change counts after 10 ms at most.
        """
        with self._lock:
            if (now := self._clock()) >= self._look_at:
                self._look_at = now + _LOOK_INTERVAL_S
                try:
                    self.check()
                except ConfigError:
                    self._grants, self._version = {}, None
            return self._grants.get(key)

    def check(self) -> None:
        """Read the file if it has changed. Raises ConfigError for a bad one, or one that others can write."""
        with _readable_errors(self._path):
            status = self._path.stat()
            version = (status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size)
            if version == self._version:
                return
            if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                allowed = f"a file that only its owner can write: chmod 600 {self._path}"
                raise ConfigError("keys", str(self._path), allowed)
            grants: dict[bytes, ClientGrant] = {}
            for number, key, words in _parse(self._path, _read(self._path)):
                grant = _parse_grant(self._path, number, words)
                if grants.setdefault(key, grant) != grant:
                    allowed = f"no second line for the key of {grants[key].name!r} that says something else"
                    raise ConfigError("keys", f"{self._path}, line {number}", allowed)
            self._grants, self._version = grants, version


def _check_curve() -> None:
    if not zmq.has("curve"):
        raise ConfigError("keys", "CURVE", "a pyzmq that is built with libsodium, as its wheels are")


def _read_secret(path: Path) -> bytes:
    with _readable_errors(path):
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError("keys", str(path), f"a file that only its owner can read: chmod 600 {path}")
    return _read_one_key(path)


def _read_one_key(path: Path) -> bytes:
    with _readable_errors(path):
        keys = list(_parse(path, _read(path)))
    if len(keys) != 1:
        raise ConfigError("keys", str(path), f"a file with one key, not {len(keys)}")
    return keys[0][1]


def _parse(path: Path, text: bytes) -> Iterator[tuple[int, bytes, str]]:
    """(number, key, what follows it) of each line with a key.

    An error shows nothing of a line that is no key, as it may be a part of a secret.
    """
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith(b"# "):
            continue
        key, _, name = line.strip().partition(b" ")
        if not _KEY.fullmatch(key):
            raise ConfigError("keys", str(path), f"a key of {KEY_LENGTH} characters (Z85) in line {number}")
        yield number, key, name.strip().decode(errors="replace")


def _parse_grant(path: Path, number: int, text: str) -> ClientGrant:
    """What follows a key: words of its name, and grants. Raises ConfigError."""
    words, mark, remark = f" {text}".partition(" # ")
    values: dict[str, Any] = {}
    names: list[str] = []
    for word in words.split():
        name, is_grant, value = word.partition("=")
        if not is_grant:
            names.append(word)
        elif (name, value) == ("tenants", "own"):
            values["may_name_tenants"] = True
        elif name in _READ and (read := _READ[name](value)) is not None:
            values[name] = read
        else:
            raise ConfigError("keys", f"{path}, line {number}: {word}", _GRANT_WORDS)
    return ClientGrant(" ".join(names) + (f"{mark}{remark}" if mark else "").rstrip(), **values)


def _read_weight(text: str) -> float | None:
    with contextlib.suppress(ValueError):
        weight = float(text)
        return weight if math.isfinite(weight) and 0.0 < weight <= MAX_CLIENT_WEIGHT else None
    return None


def _read_priority(text: str) -> int | None:
    return int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else None


_READ: dict[str, Callable[[str], float | int | None]] = {"weight": _read_weight, "priority": _read_priority}


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_MAX_FILE_BYTES)


def _write_pair(folder: Path, names: tuple[str, str], pair: tuple[bytes, bytes]) -> None:
    for name, key, mode in zip(names, pair, (0o644, 0o600), strict=True):
        _write(folder / name, key + b"\n", mode)


def _write(path: Path, text: bytes, mode: int) -> None:
    """Write a new file. A file that exists is an error, also if it was made just now."""
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(text)


@contextlib.contextmanager
def _readable_errors(path: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        shown = error.filename or path
        raise ConfigError("keys", str(shown), f"a key file ({error.strerror}); {_MAKE_HINT}") from None
