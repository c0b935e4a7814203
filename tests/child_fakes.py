"""Stand-ins for child processes: they note what is done to them and end when they are told to."""

from __future__ import annotations

from quire.ipc.processes.process import ProcessHandle


class FakeProcess(ProcessHandle):
    """A process without one. `done` is what its owner did to it."""

    is_computing = False
    cpu_time_s = 0.0
    is_stopped = False
    exit_code = None

    def __init__(self) -> None:  # of a handle it has nothing: there is no process to open
        self.done: list[str] = []

    def dump_stacks(self) -> None:
        self.done.append("dump")

    def kill(self, because: str) -> None:
        self.done.append(f"kill: {because}")

    def describe_exit(self) -> str:
        return "child (pid 7) was killed by SIGKILL"

    def close_lifeline(self) -> None:
        """There is none."""

    def stop(self, grace_s: float) -> int:
        self.done.append(f"stop: {grace_s:g}")
        return -9

    def _reap(self) -> int:
        return -9
