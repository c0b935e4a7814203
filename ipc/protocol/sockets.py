"""How Quire's ZeroMQ sockets are made: one ROUTER that binds, DEALERs that connect, limits finite but one.

libzmq 4.3.5: a full or unknown peer of a ROUTER is dropped silently unless ROUTER_MANDATORY is set; without
heartbeats a stopped peer is never noticed; an infinite linger hangs at exit; a high-water mark of 0 grew by
206 MB for 50,000 messages of 4 KB to a stopped reader.

Only the ROUTER sends heartbeats. A socket that does, and whose receive queue is full when its peer leaves,
aborts its process at the next one (stream_engine_base.cpp, out_event: `!_io_error`; zeromq/libzmq#4229 is its
kin). A DEALER's program may be slow to read; the ROUTER, which the core reads at every turn, has no mark: one
of 262,144 messages was reached with 1 MB. A DEALER that stays full answers no heartbeat: it is dropped, and
resumes when it reads.
"""

from __future__ import annotations

import secrets
import struct
from pathlib import Path
from typing import TypeVar

import zmq

from ..daemon.private_folder import make_socket_folder
from ..errors import ConfigError
from ..network.keys import ClientKeys, ServerKeys
from .codec import MAX_BODY_BYTES

HIGH_WATER_MARK = 1024  # messages a peer may have queued before its sender sees EAGAIN
HEARTBEAT_INTERVAL_MS = 500
HEARTBEAT_TIMEOUT_MS = 1500  # a client's lease: one that is stopped is dropped, and comes back later
# Losing a worker loses steps, and a starved one is only late. One of this machine whose end nobody sees
# is rare; of a silent node nothing else is seen.
WORKER_HEARTBEAT_TIMEOUT_MS, NODE_HEARTBEAT_TIMEOUT_MS = 60_000, 10_000
NETWORK_SILENCE_MS = 3000  # after which a client of the network takes its connection for lost
NETWORK_HANDSHAKE_MS = 3000  # what a connection over TCP gets to show its key
NETWORK_RECONNECT_MAX_MS = 500
RECONNECT_INTERVAL_MS = 20  # a restarted engine is found this soon
LINGER_MS = 500  # last words (an EngineDead, a Goodbye) get this long to leave
MAX_IPC_PATH_BYTES = 107  # sockaddr_un holds 108 with the closing zero
IDENTITY_BYTES = 16

# Plain numbers: pyzmq's enums cost a microsecond an operation.
NOBLOCK = int(zmq.NOBLOCK)
_MORE_NOBLOCK = int(zmq.SNDMORE | zmq.NOBLOCK)
POLLIN, POLLOUT = int(zmq.POLLIN), int(zmq.POLLOUT)
_EVENT = struct.Struct("=hi")  # of a monitor: what, and of which descriptor

_SocketT = TypeVar("_SocketT", bound=zmq.Socket[bytes])


def make_ipc_address(path: str) -> str:
    """`ipc://path`. Raises ConfigError when the kernel's limit on socket paths does not allow it."""
    if len(path.encode()) > MAX_IPC_PATH_BYTES:
        raise ConfigError(
            "socket path", path, f"at most {MAX_IPC_PATH_BYTES} bytes; set XDG_RUNTIME_DIR shorter"
        )
    return f"ipc://{path}"


def bind_router(
    context: zmq.Context[zmq.Socket[bytes]],
    address: str,
    *,
    heartbeat_timeout_ms: int | None = HEARTBEAT_TIMEOUT_MS,
    max_frame_bytes: int = MAX_BODY_BYTES,
) -> zmq.Socket[bytes]:
    """A listening ROUTER. Sends raise zmq.Again (slow peer) or EHOSTUNREACH (gone) rather than drop.

    Without a heartbeat time-out a stopped peer keeps its connection. Who sends a longer frame loses its own.
    """
    socket = _make_router(context, heartbeat_timeout_ms, max_frame_bytes)
    make_socket_folder(Path(address.removeprefix("ipc://")))
    socket.bind(address)
    return socket


def bind_network_router(
    context: zmq.Context[zmq.Socket[bytes]],
    listening_fd: int,
    keys: ServerKeys,
    *,
    heartbeat_timeout_ms: int | None = HEARTBEAT_TIMEOUT_MS,
    max_frame_bytes: int = MAX_BODY_BYTES,
) -> zmq.Socket[bytes]:
    """As `bind_router`, for clients that come over TCP with CURVE keys to a socket that listens already.

    Who is let in a ZAP handler of this context says; without one nobody is. A client takes the connection
    for lost that has brought nothing, not even a heartbeat, for NETWORK_SILENCE_MS, or as long as it may be
    silent itself if that is longer.
    """
    socket = _make_router(context, heartbeat_timeout_ms, max_frame_bytes)
    if heartbeat_timeout_ms is not None:
        socket.setsockopt(zmq.HEARTBEAT_TTL, max(NETWORK_SILENCE_MS, heartbeat_timeout_ms))
    socket.setsockopt(zmq.HANDSHAKE_IVL, NETWORK_HANDSHAKE_MS)
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt(zmq.ZAP_DOMAIN, b"quire")
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    socket.setsockopt(zmq.USE_FD, listening_fd)
    socket.bind("tcp://127.0.0.1:0")  # of which libzmq takes only the scheme
    return socket


def _make_router(
    context: zmq.Context[zmq.Socket[bytes]], heartbeat_timeout_ms: int | None, max_frame_bytes: int
) -> zmq.Socket[bytes]:
    socket = _configure(context.socket(zmq.ROUTER))
    socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
    socket.setsockopt(zmq.RCVHWM, 0)  # none: any could be reached, and the peer then leave
    if heartbeat_timeout_ms is not None:
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, heartbeat_timeout_ms)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # who comes back must not find its old self in the way
    return socket


def connect_dealer(
    socket: _SocketT,
    address: str,
    identity: bytes | None = None,
    *,
    high_water_mark: int = HIGH_WATER_MARK,
    keys: ClientKeys | None = None,
) -> _SocketT:
    """Set up a fresh DEALER `socket` (of a plain or asyncio context) and connect it.

    `identity` defaults to a random one. Nothing is queued before the connection stands (ZMQ_IMMEDIATE), so
    nothing can be handed to an engine that was not there when it was sent. `keys`: of a TCP address.
    """
    _configure(socket)
    if keys is not None:
        _use_keys(socket, keys)
    socket.setsockopt(zmq.SNDHWM, high_water_mark)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_INTERVAL_MS)
    socket.setsockopt(zmq.IDENTITY, identity or b"c" + secrets.token_bytes(IDENTITY_BYTES - 1))
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.connect(address)
    return socket


def read_events(socket: zmq.Socket[bytes]) -> int:
    """POLLIN and POLLOUT, as far as they hold. Handles what a send or receive may have put off."""
    return int(socket.getsockopt(zmq.EVENTS))


def has_message(socket: zmq.Socket[bytes]) -> bool:
    """Whether a receive would return at once: a third of what one costs that raises zmq.Again."""
    return bool(read_events(socket) & POLLIN)


def receive_event(monitor: zmq.Socket[bytes]) -> tuple[int, int]:
    """The next event of a socket and its value, often a descriptor. Raises zmq.Again when there is none.

    pyzmq's own parser loads asyncio, a tenth of a core's start.
    """
    head, _endpoint = monitor.recv_multipart(NOBLOCK)
    event, value = _EVENT.unpack(head)
    return event, value


def send_to(router: zmq.Socket[bytes], identity: bytes, frames: tuple[bytes]) -> None:
    """Send a message to a ROUTER's peer without waiting; a third of what `send_multipart` costs.

    Raises zmq.Again (slow peer) or EHOSTUNREACH (gone) for the first part, and then has sent neither.
    """
    router.send(identity, _MORE_NOBLOCK)
    router.send(frames[0], NOBLOCK)


def _use_keys(socket: zmq.Socket[bytes], keys: ClientKeys) -> None:
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, NETWORK_HANDSHAKE_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, NETWORK_RECONNECT_MAX_MS)


def _configure(socket: _SocketT) -> _SocketT:
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_BODY_BYTES)
    return socket
