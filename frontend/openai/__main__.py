"""`python -m quire.frontend.openai`: one HTTP process of several, started by HttpGroup, never by hand."""

import os
import socket
import sys

import msgspec

from ...ipc.errors import QuireError
from ...ipc.process import EXIT_OK, EXIT_START_FAILED, Lifeline
from ..async_llm import AsyncLLM
from .group import EXIT_ENGINE_LOST, HttpLaunch
from .options import HTTP_CLIENT_KIND
from .server import run_server

_PARENT_LOST_GRACE_S = 0.5


def main() -> int:
    """Serve until SIGTERM, or until the parent is gone."""
    lifeline = Lifeline()
    lifeline.watch(_PARENT_LOST_GRACE_S)
    launch = msgspec.msgpack.decode(lifeline.launch, type=HttpLaunch)
    llm = AsyncLLM(attach=launch.attach, client_kind=HTTP_CLIENT_KIND)
    is_ready = False

    def on_ready() -> None:
        nonlocal is_ready
        is_ready = True
        os.write(launch.ready_fd, b".")

    try:
        with socket.socket(fileno=launch.listening_fd) as listening_socket:
            run_server(llm, launch.options, listening_socket, on_ready)
    except QuireError as error:
        print(f"quire: error: {error}", file=sys.stderr)
        return EXIT_ENGINE_LOST if is_ready else EXIT_START_FAILED
    return EXIT_OK


sys.exit(main())
