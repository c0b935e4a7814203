"""What tests of daemons share: a runtime folder of their own, fake daemons, and looking after processes."""

from __future__ import annotations

import contextlib
import os
import select
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from forked import fork_children
from quire.frontend import daemon
from quire.frontend.client import engines
from quire.frontend.daemon import find_log, start_daemon
from quire.ipc.daemon.daemon_state import read_state
from quire.ipc.daemon.run_dir import find_daemon, find_named
from quire.ipc.processes import process
from quire.ipc.spec.config import EngineConfig


@contextlib.contextmanager
def runtime_folders() -> Iterator[Path]:
    """Run directories and logs in a short temporary folder; fails if a process of a daemon is left there."""
    with (
        tempfile.TemporaryDirectory(prefix="q", dir="/tmp") as folder,  # pytest's own are too long
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("XDG_RUNTIME_DIR", folder)
        patch.setenv("XDG_STATE_HOME", folder + "/state")
        yield Path(folder)
        wait_until(lambda: not find_processes(folder), 3.0)
        left = find_processes(folder)
        for process in left:
            process.kill()
        assert not left, f"processes live on: {left}"


@contextlib.contextmanager
def fake_modules(module: str = "fake_core") -> Iterator[None]:
    """Engines that are started in this block have a FakeWorker, in daemons too.

    It is in the core (fake_core.py), or in a process of its own (fake_process.py).
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "subprocess", fork_children())
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        patch.setattr(engines, "CORE_MODULE", module)
        patch.setattr(daemon, "CORE_MODULE", module)
        yield


class Daemon:
    """A running daemon, stopped (or killed) when left."""

    def __init__(
        self, name: str, config: EngineConfig, *, listen: str | None = None, keys: str | None = None
    ) -> None:
        self.name = name
        try:
            self.pid = start_daemon(name, config, listen=listen, keys=keys)
        except Exception as error:
            if find_log(name).exists():
                error.add_note(find_log(name).read_text())
            raise

    @property
    def core_pid(self) -> int:
        """Of the core that runs now."""
        state = read_state(find_named(self.name))
        assert state is not None
        assert state.core_pid is not None
        return state.core_pid

    @property
    def listen(self) -> str:
        """Where clients of other machines come."""
        state = read_state(find_named(self.name))
        assert state is not None
        return state.listen

    @property
    def num_restarts(self) -> int:
        state = read_state(find_named(self.name))
        return -1 if state is None else state.num_restarts

    def wait_until_ready(self, num_restarts: int, timeout_s: float = 20.0) -> None:
        """Until the engine has been restarted that often and is ready again."""

        def is_ready() -> bool:
            state = read_state(find_named(self.name))
            return state is not None and state.state == "ready" and state.num_restarts >= num_restarts

        assert wait_until(is_ready, timeout_s), read_state(find_named(self.name))

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(Exception):
            if find_daemon(self.name) == self.pid:
                daemon.stop_daemon(self.name)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def wait_for_end(pid: int, timeout_s: float = 3.0) -> float:
    """Seconds until the process has ended; fails if it lives on."""
    began = time.monotonic()
    with contextlib.suppress(ProcessLookupError):
        fd = os.pidfd_open(pid)
        has_ended = bool(select.select([fd], [], [], timeout_s)[0])
        os.close(fd)
        assert has_ended, f"process {pid} lives on"
    return time.monotonic() - began


def wait_until(is_true: Callable[[], object], timeout_s: float, every_s: float = 0.01) -> bool:
    """Ask again and again, a little apart, until it is; False when the time is over."""
    deadline = time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() > deadline:
            return False
        select.select([], [], [], every_s)
    return True


def find_processes(runtime_dir: str) -> list[psutil.Process]:
    """Processes with this XDG_RUNTIME_DIR, without this one and what has ended."""
    found: list[psutil.Process] = []
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_ours = runtime_dir in (one.environ().get("XDG_RUNTIME_DIR"), one.cwd())  # as forked.py has it
            if is_ours and one.pid != os.getpid() and one.status() != psutil.STATUS_ZOMBIE:
                found.append(one)
    return found
