"""A script that runs compilers for the process that started it, and ends with it and all of them.

A worker may be killed at any moment, and a compiler that is killed leaves its own children running. So they
are all of this script's process group, which it kills when its standard input ends. That begins with a line
of JSON, {"phases": [[command, ...], ...], "num_at_once": int}; standard output says what went wrong, or "ok".
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

OK = "ok"
_MAX_ERROR_CHARS = 500
_PARENT_CHECK_INTERVAL_S = 0.5


def main() -> None:
    """Run each phase's commands, as many at a time as are to be, until all are done or one has failed."""
    job = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    for commands in job["phases"]:
        with ThreadPoolExecutor(job["num_at_once"]) as pool:
            for error in pool.map(_run, commands):
                if error is not None:
                    _say(error)
                    os.killpg(0, signal.SIGKILL)
    _say(OK)


def _run(command: list[str]) -> str | None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode == 0:
        return None
    # Compilers quote sources and speak in the terminal's encoding.
    text = done.stderr.decode(errors="replace").strip()[:_MAX_ERROR_CHARS]
    return f"{command[0]} failed: {text or f'exit code {done.returncode}'}"


def _say(text: str) -> None:
    sys.stdout.buffer.write(text.encode(errors="replace"))
    sys.stdout.flush()


def _end_with_parent(parent_pid: int) -> None:
    # The parent's pid is looked at too: what it forks may hold the pipe open.
    poller = select.poll()
    poller.register(0, select.POLLIN)
    while os.getppid() == parent_pid and not poller.poll(_PARENT_CHECK_INTERVAL_S * 1000):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
