"""The library's file: built once, by one process, whole or not at all; a fake compiler is on PATH."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from daemons import wait_for_end, wait_until
from quire.kernels.program import build

# Notes each call, and writes what it was asked for.
COMPILER = """#!/bin/sh
echo $$ >> "$CALLS"
while [ $# -gt 0 ]; do case $1 in -o) out=$2; shift;; esac; shift; done
printf 'a library of some bytes' > "$out"
"""
# A driver that waits for a compiler, as g++ does; the compiler is not its own when it is killed.
ENDLESS = '#!/bin/sh\necho $$ >> "$CALLS"\nsleep 1000 &\necho $! >> "$CALLS"\nwait\n'
BUILD = [sys.executable, "-c", "from quire.kernels.program.build import build_library; build_library()"]
HOLD = """
import fcntl, sys
file = open(sys.argv[1])
fcntl.flock(file, fcntl.LOCK_SH)
print(flush=True)
sys.stdin.read()
"""
NUM_JOBS = 1 + len(list(Path(build.__file__).parents[1].rglob("*.cpp")))


class Compiler:
    """A g++ that is a shell script, and the pids of its calls."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "bin" / "g++"
        self.path.parent.mkdir()
        self.calls_file = folder / "calls"
        self.become(COMPILER)

    def become(self, script: str) -> None:
        self.calls_file.write_text("")
        self.path.write_bytes(script.encode("latin-1"))
        self.path.chmod(0o755)

    @property
    def pids(self) -> list[int]:
        return [int(line) for line in self.calls_file.read_text().split()]


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    compiler = Compiler(tmp_path)
    monkeypatch.setenv("PATH", f"{compiler.path.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(compiler.calls_file))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return compiler


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_second_build_finds_the_first_ones_file(compiler: Compiler) -> None:
    library = build.build_library()
    assert library.parent.stat().st_mode & 0o777 == 0o700
    assert names(library.parent) == ["build.lock", library.name]
    assert len(compiler.pids) == NUM_JOBS
    assert build.build_library() == library
    assert len(compiler.pids) == NUM_JOBS


@pytest.mark.parametrize("size", [0, 10, 40, -1])
def test_a_truncated_library_is_built_anew(compiler: Compiler, size: int) -> None:
    library = build.build_library()
    whole = library.read_bytes()
    library.write_bytes(whole[:size])
    build.build_library()
    assert library.read_bytes() == whole
    assert len(compiler.pids) == 2 * NUM_JOBS


@pytest.mark.usefixtures("compiler")
def test_a_library_with_another_byte_is_built_anew() -> None:
    library = build.build_library()
    whole = library.read_bytes()
    library.write_bytes(b"A" + whole[1:])
    build.build_library()
    assert library.read_bytes() == whole


def test_what_a_compiler_says_need_not_be_utf_8(compiler: Compiler) -> None:
    compiler.become("#!/bin/sh\nprintf 'schlie\xdfen' >&2\nexit 1\n")
    with pytest.raises(RuntimeError, match=r"g\+\+ failed: schlie.en"):
        build.build_library()


def test_of_two_that_want_a_library_at_once_one_builds_it(compiler: Compiler) -> None:
    builders = [subprocess.Popen(BUILD, stdin=subprocess.DEVNULL) for _ in range(3)]
    assert [builder.wait(60) for builder in builders] == [0, 0, 0]
    assert len(compiler.pids) == NUM_JOBS


def test_a_builder_that_is_killed_takes_its_compilers_along_and_leaves_nothing(compiler: Compiler) -> None:
    compiler.become(ENDLESS)
    num_at_once = min(len(os.sched_getaffinity(0)), NUM_JOBS - 1)
    with subprocess.Popen(BUILD, stdin=subprocess.DEVNULL) as builder:
        assert wait_until(lambda: len(compiler.pids) == 2 * num_at_once, 20.0)
        builder.kill()
    for pid in compiler.pids:
        wait_for_end(pid)
    assert len(compiler.pids) == 2 * num_at_once  # never more than there are cores
    folder = build.cache_folder()
    assert any(name.startswith("build-") for name in names(folder))
    compiler.become(COMPILER)
    library = build.build_library()
    assert names(folder) == ["build.lock", library.name]


@pytest.mark.usefixtures("compiler")
def test_only_the_libraries_used_last_are_kept_and_those_in_use() -> None:
    folder = build.cache_folder()
    folder.mkdir(mode=0o700)
    for age in range(12):
        path = folder / f"kernels-{age:02}.so"
        path.touch()
        os.utime(path, (1000 - age, 1000 - age))
    hold = (
        "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_SH); print(); sys.stdin.read()"
    )
    command = [sys.executable, "-c", hold, str(folder / "kernels-10.so")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as user:
        assert user.stdout is not None
        user.stdout.readline()
        library = build.build_library()
        kept = names(folder)
        user.communicate()
    expected = [f"kernels-{age:02}.so" for age in (*range(build.NUM_KEPT - 1), 10)]
    assert kept == sorted(["build.lock", *expected, library.name])
