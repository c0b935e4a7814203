"""The threads of the native kernels, by a program of their own: ThreadSanitizer sees every race in it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import quire.kernels

_SOURCES = Path(quire.kernels.__file__).parent
_PROGRAM = Path(__file__).with_name("thread_pool_stress.cpp")
_COMPILER = shutil.which("g++")

pytestmark = pytest.mark.skipif(_COMPILER is None, reason="there is no g++")


@pytest.mark.parametrize("flags", [["-O3"], ["-O1", "-fsanitize=thread"]], ids=["plain", "sanitized"])
def test_every_task_runs_once_and_is_over_when_its_job_is(tmp_path: Path, flags: list[str]) -> None:
    program = tmp_path / "stress"
    command = [str(_COMPILER), "-std=c++17", "-pthread", *flags, f"-I{_SOURCES}", "-o", str(program)]
    built = subprocess.run(
        [*command, str(_PROGRAM), str(_SOURCES / "thread_pool.cpp")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    if "-fsanitize=thread" in flags and "tsan" in built.stderr:
        pytest.skip("the compiler comes without ThreadSanitizer")
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([str(program)], capture_output=True, text=True, timeout=60, env=dict(os.environ))
    assert ran.stderr == ""
    assert ran.stdout == "wrong 0 nested some elsewhere some\n"
    assert ran.returncode == 0


def test_a_forked_process_starts_threads_of_its_own(tmp_path: Path) -> None:
    program = tmp_path / "fork"
    sources = [str(_PROGRAM.with_name("thread_pool_fork.cpp")), str(_SOURCES / "thread_pool.cpp")]
    command = [str(_COMPILER), "-std=c++17", "-pthread", "-O3", f"-I{_SOURCES}", "-o", str(program), *sources]
    subprocess.run(command, check=True, timeout=60)
    ran = subprocess.run([str(program)], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout == "failed 0\n"
