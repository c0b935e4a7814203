"""Spare processes: who connects adopts them, and they outlive their starter by a moment. Real processes."""

from __future__ import annotations

import os
import signal
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from daemons import wait_for_end, wait_until
from quire.ipc.processes.process import EXIT_PARENT_LOST, ChildProcess, wait_readable
from quire.ipc.processes.spare import AdoptedProcess, find_spare_path

GRACE_S = 0.6  # of these spares; the product's, SPARE_GRACE_S, is longer
SPARE = """
import sys, time
from quire.ipc.processes.process import Lifeline
from quire.ipc.processes.spare import wait_for_adoption
lifeline = Lifeline()
lifeline.watch(grace_s=GRACE_S)
args = wait_for_adoption(lifeline.args.decode(), lifeline)
open(sys.argv[1], "wb").write(args)
time.sleep(60)
"""


class Spare:
    """A spare that waits at `path`, and the file that it writes its arguments to."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "spare.sock")
        self._seen = folder / "seen"
        self.child = ChildProcess.start("spare_child", str(self._seen), self.path.encode())
        assert wait_until(lambda: os.path.exists(self.path), 10.0), self.child.describe_exit()

    def wait_for_args(self, size: int) -> bytes:
        assert wait_until(lambda: self._seen.exists() and self._seen.stat().st_size == size, 10.0)
        return self._seen.read_bytes()


@pytest.fixture
def spare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Spare]:
    (tmp_path / "spare_child.py").write_text(SPARE.replace("GRACE_S", str(GRACE_S)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    spare = Spare(tmp_path)
    yield spare
    spare.child.stop(0.0)


def adopt(spare: Spare, args: bytes = b"x") -> AdoptedProcess:
    adopted = AdoptedProcess.adopt(spare.path, "worker", args)
    assert adopted is not None
    assert spare.wait_for_args(len(args)) == args
    return adopted


def lives_on(process: AdoptedProcess) -> bool:
    """Longer than it would without an adopter."""
    return not wait_readable(process.pid_fd, GRACE_S + 0.5)


def test_who_connects_adopts_it_and_it_ends_with_its_adopter(spare: Spare) -> None:
    adopted = adopt(spare, bytes(range(256)) * 1000)
    assert (adopted.pid, adopted.exit_code, os.path.exists(spare.path)) == (spare.child.pid, None, False)
    spare.child.close_lifeline()  # its starter no longer counts
    assert lives_on(adopted)
    for _ in range(2):
        assert adopted.stop(grace_s=5.0) == EXIT_PARENT_LOST


def test_a_stopped_one_does_not_outlive_its_adopter(spare: Spare) -> None:
    adopted = adopt(spare)
    process = psutil.Process(adopted.pid)
    process.suspend()
    assert wait_until(lambda: process.status() == psutil.STATUS_STOPPED, 5.0)
    assert adopted.stop(grace_s=10.0) == EXIT_PARENT_LOST


@pytest.mark.parametrize("because", ["", ": it did not answer"])
def test_a_killed_one_says_how_and_for_what_reason(spare: Spare, because: str) -> None:
    adopted = adopt(spare)
    if because:
        adopted.kill(because.removeprefix(": "))
    else:
        os.kill(adopted.pid, signal.SIGKILL)
    assert wait_readable(adopted.pid_fd, 5.0)
    assert adopted.stop(grace_s=0.0) == -signal.SIGKILL
    assert adopted.describe_exit() == f"worker (pid {adopted.pid}) was killed by SIGKILL{because}"


def test_nobody_waits_where_there_is_no_spare(tmp_path: Path) -> None:
    assert AdoptedProcess.adopt(str(tmp_path / "spare.sock"), "worker", b"x") is None
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "spare.sock"))  # as one that was killed leaves it
    assert AdoptedProcess.adopt(str(tmp_path / "spare.sock"), "worker", b"x") is None


def test_one_whose_starter_is_gone_waits_a_moment_for_the_next_and_leaves(spare: Spare) -> None:
    began = time.monotonic()
    spare.child.close_lifeline()
    wait_for_end(spare.child.pid, GRACE_S + 2.0)
    assert time.monotonic() - began >= GRACE_S


def test_one_whose_starter_is_gone_can_be_adopted_meanwhile(spare: Spare) -> None:
    spare.child.close_lifeline()
    adopted = adopt(spare)
    assert lives_on(adopted)
    adopted.stop(0.0)


def test_half_a_launch_adopts_nobody(spare: Spare) -> None:
    with socket.socket(socket.AF_UNIX) as visitor:
        visitor.connect(spare.path)
        visitor.sendall(struct.pack("<I", 100) + b"half")
    adopt(spare, b"whole").stop(0.0)


def test_it_waits_beside_the_workers_socket() -> None:
    assert find_spare_path("ipc:///run/quire/one/worker.sock") == "/run/quire/one/spare.sock"
