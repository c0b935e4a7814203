"""Processes that a run starts and talks to in lines: their plan, "ready", a word to begin, their results."""

from __future__ import annotations

import contextlib
import select
import subprocess
import threading
from collections.abc import Generator, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from ...ipc.errors import QuireError
from ...ipc.processes.process import module_command
from .asks import ClientPlan
from .record import Record, Sent

READY_TIMEOUT_S = 60.0
_CLOSE_TIMEOUT_S = 5.0
_Item = TypeVar("_Item", bound=msgspec.Struct)
_Last = TypeVar("_Last", bound=msgspec.Struct)


class LineProcess(Generic[_Item, _Last]):
    """`python -P -m module`; from `begin` on its lines are read in a thread, until its last words.

    `items` are what has come; `last` are its last words, None before it has said them.
    """

    def __init__(self, module: str, plan: msgspec.Struct, item: type[_Item], last: type[_Last]) -> None:
        self.items: list[_Item] = []
        self.last: _Last | None = None
        self._name, self._last_type = module.rpartition(".")[2], last
        self._decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(item | last)
        command = module_command(module)
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._write(msgspec.json.encode(plan))

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

    def end(self, timeout_s: float) -> _Last | None:
        """Wait for its last words, which are returned, and leave nothing of it."""
        self._reader.join(timeout_s)
        self.close()
        return self.last

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
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not line.endswith(b"\n"):  # it was killed within the line
                return
            item = self._decoder.decode(line)
            if isinstance(item, self._last_type):
                self.last = item
                return
            self.items.append(item)


class ClientProcess(LineProcess[Record, Sent]):
    """A process of `client`; its items are the records of requests that have ended."""

    def __init__(self, plan: ClientPlan) -> None:
        super().__init__(f"{__package__}.client", plan, Record, Sent)
        self.plan = plan


@contextlib.contextmanager
def all_ready(processes: Sequence[LineProcess[Any, Any]]) -> Generator[None]:
    """They are ready within the block, and gone after it. Raises QuireError."""
    try:
        for process in processes:
            process.wait_until_ready()
        yield
    finally:
        for process in processes:
            process.close()
