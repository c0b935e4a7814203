"""`python -m quire.frontend.http`: one HTTP process of several, started by HttpGroup, never by hand."""

import asyncio
import contextlib
import functools
import socket
import sys

from ...ipc.decoding import decode_msgpack
from ...ipc.errors import QuireError
from ...ipc.processes.process import EXIT_OK, EXIT_START_FAILED, Lifeline, enable_stack_dumps
from ..async_llm import AsyncLLM
from .engines.served_models import ServedModels
from .group import ALIVE, EXIT_ENGINE_LOST, FAILED, PHASE, SERVES, HttpArgs
from .options import HTTP_CLIENT_KIND
from .server import run_server

_PARENT_LOST_GRACE_S = 0.5


class Control:
    """This process's end of the socket to its group."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(False)
        self.has_served = False

    def begin(self) -> None:
        """In the event loop: from now on every byte is answered, as long as the loop turns."""
        asyncio.get_running_loop().add_reader(self._socket, self._answer)
        self._say(ALIVE)

    def tell(self, kind: bytes, text: str) -> None:
        """A line: it SERVES, a PHASE of the engine's start has begun, or it has FAILED to start."""
        self.has_served = self.has_served or kind == SERVES
        self._say(kind + " ".join(text.split("\n")).encode(errors="replace") + b"\n")

    def _answer(self) -> None:
        data = b""
        with contextlib.suppress(OSError):
            data = self._socket.recv(64)
        if data:
            self._say(ALIVE)
        else:  # the group is gone, which the lifeline acts on
            asyncio.get_running_loop().remove_reader(self._socket)

    def _say(self, word: bytes) -> None:
        with contextlib.suppress(OSError):
            self._socket.send(word)


def main() -> int:
    """Serve until SIGTERM, or until the parent is gone."""
    lifeline = Lifeline()
    enable_stack_dumps()
    lifeline.watch(_PARENT_LOST_GRACE_S)
    args = decode_msgpack(lifeline.args, HttpArgs)
    control = Control(args.control_fd)
    engines = args.attach
    if not isinstance(engines, tuple):
        engines = AsyncLLM(attach=engines, client_kind=HTTP_CLIENT_KIND)

    def note_serving(models: ServedModels) -> None:
        control.tell(SERVES, models.describe_formats())

    try:
        with socket.socket(fileno=args.listening_fd) as listening_socket:
            run_server(
                engines,
                args.options,
                listening_socket,
                note_serving,
                functools.partial(control.tell, PHASE),
                on_loop=control.begin,
                peers=args.peers,
            )
    except QuireError as error:
        if control.has_served:  # the group says so, once for all its processes; likewise of a failed start
            return EXIT_ENGINE_LOST
        control.tell(FAILED, str(error))
        return EXIT_START_FAILED
    return EXIT_OK


sys.exit(main())
