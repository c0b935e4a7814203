"""The listening socket of a server: bound before anything loads, so that a port in use is told at once."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import shlex
import socket
import stat
from collections.abc import Generator

from ....ipc.errors import ConfigError

LOCAL_NAME = "localhost"
BACKLOG = 2048


def is_loopback(host: str) -> bool:
    """Whether an address to listen on is reached from this machine only."""
    try:
        if host == LOCAL_NAME:
            return True
        address = ipaddress.ip_address(host)
        # gRPC listens on IPv4 by a socket of IPv6: ::ffff:127.0.0.1, which Python knows from 3.13 on.
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        return (mapped or address).is_loopback
    except ValueError:
        return False


def bind_socket(host: str, port: int, share_port: bool = False) -> socket.socket:
    """A listening socket. Raises ConfigError naming the owner of a port that is in use.

    It listens at once: on Linux two sockets that do not listen may share a port. With `share_port` it joins
    the servers of this user that listen there; the kernel spreads new connections over them.
    """
    if not share_port and port:  # SO_REUSEPORT alone would not see that somebody is there
        _bind(host, port, socket.SO_REUSEADDR).close()
    return _bind(host, port, socket.SO_REUSEPORT)


def reserve_port(field: str, host: str, port: int, share_port: bool = False) -> socket.socket:
    """A socket that keeps a port, as `bind_socket` would, for who listens there with SO_REUSEPORT itself.

    `field`: what the port is called in errors. It does not listen: it would be given connections.
    """
    if not share_port and port:
        _bind(host, port, socket.SO_REUSEADDR, field).close()
    # With SO_REUSEADDR another that does not share could bind beside it before anybody listens.
    return _bind(host, port, socket.SO_REUSEPORT, field, listens=False)


def _bind(host: str, port: int, reuse: int, field: str = "port", listens: bool = True) -> socket.socket:
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError("host", host, f"an address of this machine ({error})") from None
    listening_socket = socket.socket(family, kind, proto)
    try:
        if listens:
            listening_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening_socket.setsockopt(socket.SOL_SOCKET, reuse, 1)
        listening_socket.bind(address)
        if listens:
            listening_socket.listen(BACKLOG)
    except OSError as error:
        listening_socket.close()
        if isinstance(error, PermissionError):
            raise ConfigError(field, port, f"a port that you may use ({error.strerror})") from None
        if error.errno == errno.EADDRINUSE:
            owner = _find_owner(port)
            allowed = f"a free port; this one is in use by {owner}" if owner else f"a free port ({error})"
            raise ConfigError(field, port, allowed) from None
        raise ConfigError("host", host, f"an address of this machine with that port free ({error})") from None
    return listening_socket


def _find_owner(port: int) -> str:
    """Pid and command of who listens on a port, as far as this user may see it; '' when nobody is seen."""
    import psutil

    try:
        sockets = psutil.net_connections("tcp")
        listening = [entry for entry in sockets if entry.status == psutil.CONN_LISTEN]
    except psutil.Error:
        return ""
    for connection in listening:
        if connection.laddr and connection.laddr.port == port:
            if connection.pid is None:
                return "another user's process"
            try:
                command = shlex.join(psutil.Process(connection.pid).cmdline())
            except psutil.Error:
                command = "unknown command"
            return f"pid {connection.pid} ({command[:200]})"
    return ""


# The Unix socket of a server: its file is there while the server lives.

_MAX_PATH_BYTES = 107  # the kernel's


@contextlib.contextmanager
def listen_at_path(path: str) -> Generator[socket.socket]:
    """A listening socket at `path`, whose file goes when the block is left.

    The file of a server that did not end in order is replaced; who may connect is the umask's to say. Raises
    ConfigError when a server listens there, or when something else than a socket is there.
    """
    if not 0 < len(os.fsencode(path)) <= _MAX_PATH_BYTES:
        raise ConfigError("uds", path, f"a path of 1 to {_MAX_PATH_BYTES} bytes")
    _remove_stale(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening_socket:
        try:
            listening_socket.bind(path)
            listening_socket.listen(BACKLOG)
            file = os.stat(path)
        except OSError as error:
            raise ConfigError("uds", path, f"a path where a socket can be made ({error.strerror})") from None
        try:
            yield listening_socket
        finally:
            with contextlib.suppress(OSError):
                if os.path.samestat(os.stat(path), file):  # not another server's
                    os.unlink(path)


def _remove_stale(path: str) -> None:
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise ConfigError("uds", path, "a path where nothing is, or a socket that nobody listens on")
        if _is_listened_on(path):
            raise ConfigError("uds", path, "a path where no server listens")
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise ConfigError("uds", path, f"a path that you may use ({error.strerror})") from None


def _is_listened_on(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # one whose backlog is full would have us wait
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except BlockingIOError:
            pass
        return True
