"""Stand-ins for child processes: they note what is done to them and end when they are told to."""

from __future__ import annotations


class FakeProcess:
    """A process without one. `done` is what its owner did to it."""

    def __init__(self) -> None:
        self.is_computing = False
        self.is_stopped = False
        self.done: list[str] = []

    def dump_stacks(self) -> None:
        self.done.append("dump")

    def kill(self, because: str) -> None:
        self.done.append(f"kill: {because}")

    def describe_exit(self) -> str:
        return "child (pid 7) was killed by SIGKILL"

    def stop(self, grace_s: float) -> int:
        self.done.append(f"stop: {grace_s:g}")
        return -9
