"""A client process of a run from outside: started with its plan, watched, and its records read."""

from __future__ import annotations

import select
import subprocess
import sys
import threading
from collections.abc import Sequence

import msgspec

from ...ipc.errors import QuireError
from . import client
from .asks import ClientPlan
from .checks import check_records
from .record import Golden, Record, Sent

READY_TIMEOUT_S = 60.0
_CLOSE_TIMEOUT_S = 5.0


class ClientProcess:
    """A process of `client`, and the records that it has written."""

    def __init__(self, plan: ClientPlan) -> None:
        self.plan = plan
        self.records: list[Record] = []
        self.sent: list[int] | None = None  # once it has said so
        command = [sys.executable, "-P", "-m", client.__name__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._reader = threading.Thread(target=self._read_records, daemon=True)
        self._write(msgspec.json.encode(plan))

    def wait_until_ready(self) -> None:
        """Raises QuireError."""
        stdout = self._process.stdout
        assert stdout is not None
        if not select.select([stdout], [], [], READY_TIMEOUT_S)[0] or stdout.readline() != b"ready\n":
            raise QuireError(f"the {self.plan.kind} client was not ready within {READY_TIMEOUT_S:g} s")

    def begin(self) -> None:
        """Let it send."""
        self._write(b"go")
        self._reader.start()

    @property
    def is_running(self) -> bool:
        """Until its last record has come, or it has ended otherwise."""
        return self._reader.is_alive()

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def kill(self) -> None:
        """End it at once, and read what it has written."""
        self._process.kill()
        self.close()

    def stop_sending(self) -> None:
        """Let what has been sent come to its end."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def end(self, timeout_s: float, golden: Sequence[Golden]) -> list[str]:
        """Wait for its last record; returns what is broken."""
        self._reader.join(timeout_s)
        self.close()
        kind = self.plan.kind
        if self.sent is None:
            why = f"within {timeout_s:g} s after the last kill, with {len(self.records)} requests ended"
            return [f"the {kind} client did not come to its end {why}"]
        return check_records(self.sent, self.records, golden)

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

    def _read_records(self) -> None:
        assert self._process.stdout is not None
        decoder: msgspec.json.Decoder[Record | Sent] = msgspec.json.Decoder(Record | Sent)
        for line in self._process.stdout:
            if not line.endswith(b"\n"):  # it was killed within the line
                return
            match decoder.decode(line):
                case Record() as record:
                    self.records.append(record)
                case Sent(numbers=numbers):
                    self.sent = numbers
                    return
