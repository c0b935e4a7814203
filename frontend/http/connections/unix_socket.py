"""The Unix socket of a server: its file is there while the server lives."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Generator

from ....ipc.errors import ConfigError
from .listen import BACKLOG

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
