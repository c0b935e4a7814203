"""The threads of the native kernels, by a program of their own: ThreadSanitizer sees every race in it."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
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


@pytest.fixture(scope="module")
def programs(pytestconfig: pytest.Config) -> Path:
    """Where a program is, once it has been built; of other sources there is another folder."""
    assert pytestconfig.cache is not None
    sources = [_SOURCES / "program" / f"thread_pool.{end}" for end in ("h", "cpp")]
    texts = b"".join(path.read_bytes() for path in (*sources, *map(Path, (_STRESS, _FORK))))
    return pytestconfig.cache.mkdir(f"thread_pool-{hashlib.sha256(texts).hexdigest()[:16]}")


def run(programs: Path, name: str) -> subprocess.CompletedProcess[str]:
    if not (programs / name).exists():
        command = [str(_COMPILER), "-std=c++17", "-pthread", *_PROGRAMS[name], f"-I{_SOURCES}"]
        command += ["-o", str(programs / f"{name}.part"), str(_SOURCES / "program" / "thread_pool.cpp")]
        compiler = subprocess.run(command, capture_output=True, text=True, timeout=60)
        if "tsan" in compiler.stderr:
            pytest.skip("the compiler comes without ThreadSanitizer")
        assert compiler.returncode == 0, compiler.stderr
        (programs / f"{name}.part").rename(programs / name)
    return subprocess.run([str(programs / name)], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("name", ["plain", "sanitized"])
def test_every_task_runs_once_and_is_over_when_its_job_is(name: str, programs: Path) -> None:
    ran = run(programs, name)
    assert ran.stderr == ""
    assert ran.stdout == "wrong 0 nested some elsewhere some\n"
    assert ran.returncode == 0


def test_a_forked_process_starts_threads_of_its_own(programs: Path) -> None:
    ran = run(programs, "fork")
    assert (ran.returncode, ran.stdout) == (0, "failed 0\n")
