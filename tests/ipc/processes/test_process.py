"""Child processes: arguments, lifeline, the ways to end. Real processes."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from quire.ipc.processes.own_sources import PACKAGE_DIR
from quire.ipc.processes.process import EXIT_PARENT_LOST, ChildProcess

CHILD = """
import sys, time
from quire.ipc.processes.process import Lifeline
lifeline = Lifeline()
lifeline.watch(grace_s=0.0)
open(sys.argv[1], "w").write(lifeline.args.decode() + " " + repr(sys.stdin.read()))
time.sleep(60)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "lifeline_child.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return "lifeline_child"


def test_children_run_the_package_of_their_parent(tmp_path: Path) -> None:
    package = tmp_path / "quire"
    shutil.copytree(f"{PACKAGE_DIR}/ipc", package / "ipc")
    shutil.copy(f"{PACKAGE_DIR}/__init__.py", package)
    (package / "where.py").write_text("import quire, sys; print(quire.__file__, sys.argv)")
    program = tmp_path / "program.py"  # the folder of a script is first on its path, not on its children's
    program.write_text(
        "import subprocess; from quire.ipc.processes import process\n"
        "subprocess.run(process.module_command('quire.where', 'role'), check=True)"
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{package}/__init__.py {[f'{package}/where.py', 'role']}\n", done.stderr


def _wait_for_text(path: Path, child: ChildProcess) -> str:
    while not (path.exists() and path.read_text()):
        assert not select.select([child.pid_fd], [], [], 0.02)[0], child.describe_exit()
    return path.read_text()


def test_a_child_gets_its_launch_and_leaves_when_the_lifeline_closes(module: str, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    child = ChildProcess.start(module, str(seen), b"x" * 100_000)
    assert _wait_for_text(seen, child) == "x" * 100_000 + " ''"
    assert child.stop(grace_s=5.0) == EXIT_PARENT_LOST
    assert child.stop(grace_s=5.0) == EXIT_PARENT_LOST
    assert "lost its parent" in child.describe_exit()


def test_a_child_that_cannot_write_its_stacks_yet_is_not_ended_by_being_asked(
    module: str, tmp_path: Path
) -> None:
    child = ChildProcess.start(module, str(tmp_path / "seen"), b"x")
    child.dump_stacks()
    _wait_for_text(tmp_path / "seen", child)
    child.dump_stacks()
    assert not select.select([child.pid_fd], [], [], 0.2)[0], child.describe_exit()
    child.stop(0.0)


@pytest.mark.usefixtures("module")
def test_a_child_that_does_not_leave_is_killed(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    (tmp_path / "deaf_child.py").write_text(CHILD.replace("lifeline.watch", "# "))
    child = ChildProcess.start("deaf_child", str(seen), b"x")
    _wait_for_text(seen, child)
    assert child.stop(grace_s=0.05) == -signal.SIGKILL
    assert "killed by SIGKILL" in child.describe_exit()


def test_a_stopped_child_does_not_outlive_its_parent(module: str, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    child = ChildProcess.start(module, str(seen), b"x")
    _wait_for_text(seen, child)
    os.kill(child.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    assert child.stop(grace_s=10.0) == EXIT_PARENT_LOST


def test_a_child_dies_with_its_parent_though_a_fork_holds_the_pipe(module: str, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    parent = textwrap.dedent(f"""
        import os, time
        from quire.ipc.processes.process import ChildProcess
        child = ChildProcess.start({module!r}, {str(seen)!r}, b"x")
        fork = os.fork()
        if fork == 0:
            time.sleep(60)  # a fork of the user's program that outlives it, with the pipe's end
            os._exit(0)
        while not (os.path.exists({str(seen)!r}) and open({str(seen)!r}).read()):
            time.sleep(0.01)
        print(child.pid, fork, flush=True)
        os.kill(os.getpid(), 9)
    """)
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child_pid, fork_pid = map(int, process.stdout.readline().split())
        child_fd = os.pidfd_open(child_pid)
        try:
            assert select.select([child_fd], [], [], 5.0)[0], "the child lives on without its parent"
        finally:
            os.close(child_fd)
            os.kill(fork_pid, signal.SIGKILL)
