"""SIGTERM ends a tool with all that it has started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from quire.tools.sigterm import unwinding_at_sigterm

# pause() would miss a signal that comes just before it; here each leaves a byte.
PROGRAM = """
import signal, socket
from quire.tools.sigterm import unwinding_at_sigterm
told, woken = socket.socketpair()
woken.setblocking(False)
signal.set_wakeup_fd(woken.fileno())
with unwinding_at_sigterm():
    try:
        print("inside", flush=True)
        while True:
            told.recv(1)
    finally:
        print("left", flush=True)
        if {waits_again}:
            while True:
                told.recv(1)
                print("again", flush=True)
"""


def has_ended(process: subprocess.Popen[str], within_s: float) -> bool:
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        return False
    return True


@pytest.mark.parametrize("waits_again", [False, True])
def test_the_first_one_unwinds_and_the_second_ends_at_once(waits_again: bool) -> None:
    command = [sys.executable, "-P", "-c", PROGRAM.format(waits_again=waits_again)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "inside\n"
        process.terminate()
        assert process.stdout.readline() == "left\n"
        if waits_again:
            process.terminate()
            assert process.stdout.readline() == "again\n", "it came with the first, as from timeout(1)"
            # Not faster: a process can do nothing while signals come sooner than their C handler returns.
            while not has_ended(process, 0.05):
                process.terminate()
    assert process.returncode == (-signal.SIGTERM if waits_again else 128 + signal.SIGTERM)


def test_the_handler_of_before_is_back_and_other_threads_have_none() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with unwinding_at_sigterm():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
    seen: list[bool] = []

    def enter() -> None:
        with unwinding_at_sigterm():
            seen.append(signal.getsignal(signal.SIGTERM) is before)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [True]


@pytest.mark.slow
def test_a_stress_run_that_is_terminated_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "quire", "stress", "--kills", "none", "--duration", "600"]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as run:
        try:
            assert run.stdout is not None
            deadline = time.monotonic() + 60
            while len(ours := find_processes(tmp_path)) < 4:  # of which three are the daemon's
                assert time.monotonic() < deadline
            run.terminate()
            run.stdout.read()
        finally:
            run.kill()
    _, left = psutil.wait_procs(ours, timeout=20)
    assert not left
    assert not [path for path in tmp_path.rglob("*") if not path.is_dir()]


def find_processes(folder: Path) -> list[psutil.Process]:
    """Whose run directories are there."""
    return [
        one
        for one in psutil.process_iter(["environ"])
        if str(folder) in ((one.info["environ"] or {}).get("XDG_RUNTIME_DIR") or "")
    ]
