"""The threads of the native kernels, by a program of their own: ThreadSanitizer sees every race in it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import quire.kernels

_SOURCES = Path(quire.kernels.__file__).parent
_COMPILER = shutil.which("g++")

pytestmark = pytest.mark.skipif(_COMPILER is None, reason="there is no g++")


_STRESS, _FORK = (str(Path(__file__).with_name(f"thread_pool_{name}.cpp")) for name in ("stress", "fork"))
# By name: what is built of which source.
_PROGRAMS = {
    "plain": ["-O1", _STRESS],
    "sanitized": ["-O1", "-fsanitize=thread", _STRESS],
    "fork": ["-O0", _FORK],
}


@dataclass
class Build:
    """A program that a compiler is at work on."""

    program: Path
    compiler: subprocess.Popen[str]

    def run(self) -> subprocess.CompletedProcess[str]:
        """Once it is there."""
        _, errors = self.compiler.communicate(timeout=60)
        if "tsan" in errors:
            pytest.skip("the compiler comes without ThreadSanitizer")
        assert self.compiler.returncode == 0, errors
        return subprocess.run([str(self.program)], capture_output=True, text=True, timeout=60)


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Build]]:
    """All of them, built side by side."""
    folder = tmp_path_factory.mktemp("programs")
    started: dict[str, Build] = {}
    for name, arguments in _PROGRAMS.items():
        command = [str(_COMPILER), "-std=c++17", "-pthread", *arguments, f"-I{_SOURCES}"]
        command += ["-o", str(folder / name), str(_SOURCES / "program" / "thread_pool.cpp")]
        compiler = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        started[name] = Build(folder / name, compiler)
    yield started
    for build in started.values():
        build.compiler.communicate(timeout=60)


@pytest.mark.parametrize("name", ["plain", "sanitized"])
def test_every_task_runs_once_and_is_over_when_its_job_is(name: str, builds: dict[str, Build]) -> None:
    ran = builds[name].run()
    assert ran.stderr == ""
    assert ran.stdout == "wrong 0 nested some elsewhere some\n"
    assert ran.returncode == 0


def test_a_forked_process_starts_threads_of_its_own(builds: dict[str, Build]) -> None:
    ran = builds["fork"].run()
    assert (ran.returncode, ran.stdout) == (0, "failed 0\n")
