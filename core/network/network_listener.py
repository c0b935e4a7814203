"""NetworkListener: where clients of other machines come in, over TCP with CURVE keys.

The ROUTER has a context of its own, so that strangers keep only that context's I/O thread busy. libzmq passes
a client's messages on only after a thread here has accepted its key (ZAP, RFC 27). The same thread reads the
socket's monitor, and cuts the connections that ConnectionLimits names by shutting the stream below libzmq.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

import zmq
from zmq.utils import z85

from ...ipc.network.keys import ClientGrant, ServerKeys
from ...ipc.processes.cgroup import find_free_memory
from ...ipc.processes.heap import trim_heap
from ...ipc.protocol.codec import MAX_BODY_BYTES
from ...ipc.protocol.send_window import MAX_UNREAD_BYTES
from ...ipc.protocol.sockets import (
    HEARTBEAT_TIMEOUT_MS,
    NOBLOCK,
    bind_network_router,
    has_message,
    send_to,
)
from ..clients.listener import ClientListener, take_events
from ..clients.origin import to_remote_identity, to_socket_identity

_log = logging.getLogger(__name__)

MAX_CONNECTIONS = 1024
MAX_WAITING = 128  # connections whose client has said nothing yet
_FRACTION_OF_FILES = 0.2  # of this process's descriptors, at most so many are connections of the network
# So many bytes, or a sixteenth of the memory: a client with many prompts sends them all at once, and over
# loopback all are unread.
_LEAST_UNREAD_BYTES = 512 << 20
_FRACTION_OF_MEMORY = 16
_MAX_RECEIVE_S = 0.001  # of a turn, so that who floods costs the others' steps little
# Times what a turn took that left something, until the next one: a flood gets a quarter of a processor.
_REST, _MAX_REST_S = 3, 0.1
_RECEIVED, _RECEIVED_AT = struct.Struct("=Q"), 128  # tcpi_bytes_received of struct tcp_info
_FRAME_BYTES = 2 + 33  # of a frame beside its contents: its head, and CURVE's (RFC 26)
_LONG_HEAD_BYTES, _LONGEST_SHORT = 7, 255 - 33
# Of zmq.h. With it an unread message, however small, may keep the 8 KiB that it was received into.
_ZERO_COPY_RECV = 10
_LOOK_INTERVAL_S = 0.05  # libzmq reads 1 GB/s at most
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_LOG_INTERVAL_S = 10.0  # between log lines on clients that are not let in


class NetworkListener(ClientListener):
    """Clients of other machines, with identities of their own. `stop` ends all their connections."""

    def __init__(
        self,
        listening_fd: int,
        keys: ServerKeys,
        find_grant: Callable[[bytes], ClientGrant | None],
        *,
        max_frame_bytes: int = MAX_BODY_BYTES,
        heartbeat_timeout_ms: int | None = HEARTBEAT_TIMEOUT_MS,
        linger_ms: int = 0,
        max_unread_bytes: int | None = None,
    ) -> None:
        """`find_grant(key)`, for any thread: None of a client that is not let in. `linger_ms`: what was said
        last gets so long to leave at `stop`. `max_unread_bytes`: when more waits in all, whoever has sent
        most of it is cut off, and anyhow who has sent more than clients do; only for who lets `receive` run
        until nothing is left, as long as it has time.
        """
        self._find_grant = find_grant
        self._linger_ms = linger_ms
        self._port = socket.socket(fileno=os.dup(listening_fd))
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        most = MAX_CONNECTIONS if limit == resource.RLIM_INFINITY else int(limit * _FRACTION_OF_FILES)
        self._limits = ConnectionLimits(min(MAX_CONNECTIONS, most), MAX_WAITING)
        # Twice what Quire's own clients leave unread (SendWindow), with a frame that goes beyond it. Small
        # messages take five times their bytes here.
        self._unread = UnreadBytes(max_unread_bytes, 2 * (MAX_UNREAD_BYTES + max_frame_bytes))
        self._is_behind = False  # the last `receive` has left something,
        self._rests_until = 0.0  # and the next one is due at this moment (monotonic)
        self._look_at = self._log_at = 0.0  # monotonic
        self._copies: dict[int, socket.socket] = {}  # of connections, which libzmq may close at any time
        self._limits_lock = threading.Lock()  # of these, too
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(_ZERO_COPY_RECV, 0)
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind(_ZAP_ADDRESS)
        router = bind_network_router(
            self._context,
            os.dup(listening_fd),  # libzmq closes what it is given
            keys,
            heartbeat_timeout_ms=heartbeat_timeout_ms,
            max_frame_bytes=max_frame_bytes,
        )
        super().__init__(router)

    def receive(self) -> Iterator[tuple[bytes, list[bytes]]]:
        if self._is_behind:
            self._look()
        self._is_behind = True
        began = time.monotonic()
        try:
            yield from self._read(began + _MAX_RECEIVE_S)
        finally:  # the reader may have had enough before
            if self._is_behind:
                now = time.monotonic()
                self._rests_until = now + min(_REST * (now - began), _MAX_REST_S)

    def register(self, poller: zmq.Poller) -> float | None:
        """Have the poller look at the socket, or not while what is unread has to wait; until when, if so."""
        if self._rests_until <= time.monotonic():
            poller.register(self.router, zmq.POLLIN)
            return None
        if self.router in poller:
            poller.unregister(self.router)
        return self._rests_until

    def _read(self, ends_at: float) -> Iterator[tuple[bytes, list[bytes]]]:
        """Until nothing is left, or it is so late."""
        with contextlib.suppress(zmq.Again):
            while True:
                identity, *frames = self.router.recv_multipart(NOBLOCK, copy=False)
                key = str(identity.get("User-Id")).encode()
                self._unread.note_read(key, map(len, frames))
                # What a connection has sent that is cut for it is lost with it.
                if key not in self._unread.cut_off and self._knows(identity, key):
                    yield to_remote_identity(identity.bytes, key), [frame.bytes for frame in frames]
                if time.monotonic() >= ends_at:
                    return
        self._is_behind = False
        with self._limits_lock:
            num_bytes = self._unread.forget()
        if num_bytes > MAX_UNREAD_BYTES:
            trim_heap()

    def _look(self) -> None:
        """Cut whoever has sent too much, while what is unread is not read to its end."""
        now = time.monotonic()
        if self._unread.most is None or now < self._look_at:
            return
        self._look_at = now + _LOOK_INTERVAL_S
        with self._limits_lock:
            received = {fd: count_received_bytes(copy) for fd, copy in self._copies.items()}
            excess = self._unread.look(received, self._limits.clients)
        for fd in excess:
            self._cut(fd)
        if excess:
            _log.warning("a client is cut off: it has sent more than is read")

    def send(self, identity: bytes, frames: tuple[bytes]) -> None:
        send_to(self.router, to_socket_identity(identity), frames)

    def stop(self) -> None:
        super().stop()
        self._context.destroy(linger=self._linger_ms)
        self._port.close()
        for copy in self._copies.values():
            copy.close()

    @property
    def port(self) -> int:
        """The port at which it listens."""
        return self._port.getsockname()[1]

    def _knows(self, frame: zmq.Frame, key: bytes) -> bool:
        """Whether the sender's key is still let in; if not, its connection is cut."""
        fd = int(frame.get(zmq.SRCFD))
        if self._find_grant(key) is None:
            self._cut(fd)
            return False
        with self._limits_lock:
            excess = self._limits.note_client(fd, key)
        if excess is not None:
            self._cut(excess)
            os.eventfd_write(self.lost_fd, 1)  # `_on_ended` will not find it among the clients
        return excess != fd

    def _cut(self, fd: int) -> None:
        """End a connection below libzmq, which then sees its end."""
        with self._limits_lock, contextlib.suppress(KeyError, OSError):
            self._copies[fd].shutdown(socket.SHUT_RDWR)

    # The thread, which answers which keys are let in, and reads which connections come and go.

    def _watch(self, monitor: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        with self._zap, monitor:
            for watched in (self._zap, monitor):
                poller.register(watched, zmq.POLLIN)
            while True:
                poller.poll()
                while has_message(self._zap):
                    self._zap.send_multipart(self._judge(self._zap.recv_multipart()))
                for event, fd in take_events(monitor):
                    match event:
                        case zmq.EVENT_ACCEPTED:
                            self._on_accepted(fd)
                        case zmq.EVENT_DISCONNECTED:
                            self._on_ended(fd)
                        case _:
                            return

    def _judge(self, request: list[bytes]) -> list[bytes]:
        """The answer to one caller (RFC 27): 200 with its key as the user's name, 400, or 300: try again."""
        _, request_id, _, address, _, mechanism, *credentials = request
        key = z85.encode(credentials[0]) if mechanism == b"CURVE" and credentials else b""
        if self._find_grant(key) is not None:
            if key in self._unread.cut_off:
                return [b"1.0", request_id, b"300", b"too much is unread", b"", b""]
            return [b"1.0", request_id, b"200", b"OK", key, b""]
        now = time.monotonic()
        if now >= self._log_at:
            self._log_at = now + _LOG_INTERVAL_S
            _log.warning("a client with an unknown key was not let in, from %s", address.decode())
        return [b"1.0", request_id, b"400", b"unknown key", b"", b""]

    def _on_accepted(self, fd: int) -> None:
        with self._limits_lock:
            if fd in self._copies:
                self._copies.pop(fd).close()
            copy = open_copy(fd)
            if copy is not None:
                self._copies[fd] = copy
            excess = self._limits.accept(fd, find_peer(copy))
            self._unread.begin(fd)
        if excess is not None:
            self._cut(excess)

    def _on_ended(self, fd: int) -> None:
        with self._limits_lock:
            if (copy := self._copies.pop(fd, None)) is not None:
                with copy:
                    self._unread.end(fd, count_received_bytes(copy), self._limits.clients.get(fd, b""))
            is_client = self._limits.end(fd)
        if is_client:
            os.eventfd_write(self.lost_fd, 1)


def find_max_unread_bytes() -> int:
    """What the core may hold unread, on this machine and in its control group."""
    free = find_free_memory() or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(_LEAST_UNREAD_BYTES, free // _FRACTION_OF_MEMORY)


def open_copy(fd: int) -> socket.socket | None:
    """A TCP connection once more; None if its number is nobody's, or something else's, by now."""
    with contextlib.suppress(OSError):
        copy = os.dup(fd)
        try:
            connection = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            return None
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            return connection
        connection.close()
    return None


def find_peer(connection: socket.socket | None) -> str:
    """The address at the other end of a TCP connection; '' if it has ended."""
    if connection is not None:
        with contextlib.suppress(OSError):
            return str(connection.getpeername()[0])
    return ""


def count_received_bytes(connection: socket.socket) -> int:
    """Bytes that have come over a TCP connection, unread ones too; 0 on a Linux before 4.1."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_AT + _RECEIVED.size)
    return _RECEIVED.unpack_from(info, _RECEIVED_AT)[0] if len(info) > _RECEIVED_AT else 0


class UnreadBytes:
    """What clients have sent and nobody has read: libzmq takes all that comes, and says nothing of it.

    The kernel counts what has come over a connection. `look` is called while there is something unread, and
    adds up what has come since the first look; what is read is taken off. Of no thread: calls are locked,
    except `note_read`, of the reader's.
    """

    def __init__(self, most: int | None, most_each: int) -> None:
        """`most`: in all; None: nothing is counted. `most_each`: of a key, for each of its connections."""
        self.cut_off: set[bytes] = set()  # keys, until all is read
        self.most = most
        self._most_each = most_each
        self._received: dict[int, int] = {}  # descriptor -> bytes at the last look
        self._is_counting = False
        self._peak = 0
        self._unread: Counter[bytes] = Counter()  # by key; b"": of connections whose key is not known yet

    def begin(self, fd: int) -> None:
        """A connection has come."""
        self._received[fd] = 0

    def end(self, fd: int, num_received: int, key: bytes) -> None:
        """A connection has ended, after so many bytes in all."""
        num_before = self._received.pop(fd, num_received)
        if self._is_counting:
            self._unread[key] += num_received - num_before

    def note_read(self, key: bytes, sizes: Iterable[int]) -> None:
        """A message of frames of these sizes was read."""
        if self._is_counting:
            for size in sizes:
                head = _LONG_HEAD_BYTES if size > _LONGEST_SHORT else 0
                self._unread[key] -= size + _FRAME_BYTES + head

    def look(self, received: Mapping[int, int], keys: Mapping[int, bytes]) -> list[int]:
        """Bytes that have come over each connection so far; returns those that are to be cut.

        `keys`: of connections whose key is known.
        """
        if self._is_counting:
            for fd, count in received.items():
                self._unread[keys.get(fd, b"")] += count - self._received.get(fd, count)
        self._received, self._is_counting = dict(received), True
        self._peak = max(self._peak, self._unread.total())
        if self.most is None:
            return []
        connections = Counter(keys.get(fd, b"") for fd in received)
        greedy = {
            key for key, count in self._unread.items() if count > self._most_each * connections[key] > 0
        }
        if self._unread.total() > self.most:
            greedy.add(self._unread.most_common(1)[0][0])
        self.cut_off |= greedy - {b""}
        return [fd for fd in received if keys.get(fd, b"") in greedy]

    def forget(self) -> int:
        """All is read. Returns how much was unread at most, as looks have found it."""
        peak, self._peak = self._peak, 0
        self._is_counting = False
        self._unread.clear()
        self.cut_off.clear()
        return peak


class ConnectionLimits:
    """Which connections stay, and which is cut if there are too many. For one thread; knows no socket.

    A connection waits until a message of a client with a good key has come over it. If too many wait, the
    oldest one of the address that has most of them is cut: with a key it takes a few round trips, so a crowd
    of silent callers cuts only itself. Clients always leave room for one that waits: if there are too many,
    the newest one of the key that has most of them is cut.
    """

    def __init__(self, max_connections: int, max_waiting: int) -> None:
        self._max_connections = max_connections
        self._max_waiting = max_waiting
        self._waiting: dict[int, str] = {}  # descriptor -> address, the oldest first
        self.clients: dict[int, bytes] = {}  # descriptor -> key, the oldest first

    def accept(self, fd: int, address: str) -> int | None:
        """A connection was accepted. Returns the one that is to be cut, None if there is room."""
        self.end(fd)
        self._waiting[fd] = address
        if len(self._waiting) <= min(self._max_waiting, self._max_connections - len(self.clients)):
            return None
        ((crowd, _),) = Counter(self._waiting.values()).most_common(1)
        excess = next(fd for fd, address in self._waiting.items() if address == crowd)
        del self._waiting[excess]
        return excess

    def note_client(self, fd: int, key: bytes = b"") -> int | None:
        """A client's message has come over it. Returns the one to cut for it, None if there is room."""
        if self._waiting.pop(fd, None) is None:
            return None
        self.clients[fd] = key
        if len(self.clients) < self._max_connections:
            return None
        ((greedy, _),) = Counter(self.clients.values()).most_common(1)
        excess = next(fd for fd, key in reversed(self.clients.items()) if key == greedy)
        del self.clients[excess]
        return excess

    def end(self, fd: int) -> bool:
        """A connection has ended; returns whether it was a client's."""
        self._waiting.pop(fd, None)
        return self.clients.pop(fd, None) is not None
