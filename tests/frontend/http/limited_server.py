"""A server over a scripted engine that may open few files: `python limited_server.py N`. Says its port."""

from __future__ import annotations

import resource
import socket
import sys
from pathlib import Path

TESTS = Path(__file__).parents[2]


def main() -> None:
    """Serve until SIGTERM."""
    sys.path[:0] = [str(TESTS), str(TESTS / "frontend")]
    from openai_fakes import FakeLLM
    from quire.frontend.http.connections import connection, listener
    from quire.frontend.http.options import ServerOptions
    from quire.frontend.http.server import run_server

    connection._LINGER_S = listener._RETRY_S = 0.1
    most = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    port = listener.getsockname()[1]
    run_server(FakeLLM(), ServerOptions(), listener, lambda _: print(port, flush=True))  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
