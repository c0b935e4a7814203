"""A process that this one starts and talks to in lines: its plan, "ready", a word to begin, its results."""

from __future__ import annotations

import select
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

from ...ipc.errors import QuireError

READY_TIMEOUT_S = 60.0
_CLOSE_TIMEOUT_S = 5.0


class LineProcess:
    """`python -P -m module`; from `begin` on `take` gets its lines, in a thread, until it returns False."""

    def __init__(self, module: str, plan: bytes, take: Callable[[bytes], bool]) -> None:
        self._name, self._take = module.rpartition(".")[2], take
        command = [sys.executable, "-P", "-m", module]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._write(plan)

    def wait_until_ready(self) -> None:
        """Raises QuireError."""
        stdout = self._process.stdout
        assert stdout is not None
        if not select.select([stdout], [], [], READY_TIMEOUT_S)[0] or stdout.readline() != b"ready\n":
            raise QuireError(f"the {self._name} was not ready within {READY_TIMEOUT_S:g} s")

    def begin(self) -> None:
        """Let it go on."""
        self._write(b"go")
        self._reader.start()

    @property
    def is_running(self) -> bool:
        """Until its last line has come, or it has ended otherwise."""
        return self._reader.is_alive()

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def kill(self) -> None:
        """End it at once, and read what it has written."""
        self._process.kill()
        self.close()

    def close_input(self) -> None:
        """Tell it that nothing more is wanted."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def wait_for_last_line(self, timeout_s: float) -> None:
        """Returns when it has come, or will not."""
        self._reader.join(timeout_s)

    def close(self) -> None:
        """Leave no process and no pipe; one that still writes is killed, and what it wrote is read."""
        if self._reader.is_alive():
            self._process.kill()
            self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        try:
            self._process.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _write(self, line: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + b"\n")
        self._process.stdin.flush()

    def _read(self) -> None:
        for line in self._read_whole_lines():
            if not self._take(line):
                return

    def _read_whole_lines(self) -> Iterator[bytes]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.endswith(b"\n"):  # else it was killed within the line
                yield line
