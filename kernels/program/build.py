"""The C++ kernels' shared library: compiled once per machine and source, and kept in a folder of the user's.

Several processes may want it at once and each may be killed at any moment. One compiles (the folder's lock),
in a folder that the next one removes if it was left. A library lies in a PrivateCache and is trusted only if
its last bytes are the checksum of the others: loading a truncated one is a SIGBUS. Old ones are removed, but
none that a process has loaded: it holds a lock on the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import platform
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

from ...ipc.files.private_cache import PrivateCache, find_cache_home, keep_entry, seal_file
from .run_compilers import OK

_log = logging.getLogger(__name__)

_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-pthread")
BUILD_TIMEOUT_S = 600.0  # on one slow core; of a wait for another process that builds, too
NUM_KEPT = 8  # of the libraries, by when they were loaded last
_LOCK_RETRY_S = 0.1
_SCRATCH_PREFIX = "build-"
_RUNNER = Path(__file__).with_name("run_compilers.py")


cache_folder = find_cache_home  # where compiled kernels are kept


def build_library() -> Path:
    """The library's file, compiled now unless a run on the same kind of machine left it whole.

    It is not removed while this process lives. Raises OSError or RuntimeError with the cause.
    """
    folder = Path(__file__).parents[1]
    sources = sorted(folder.rglob("*.cpp"))
    digest = hashlib.sha256("\0".join((*_FLAGS, _cpu_name())).encode())
    for path in (*sources, *sorted(folder.rglob("*.h"))):
        digest.update(path.read_bytes())
    name = f"kernels-{digest.hexdigest()[:24]}.so"
    cache = PrivateCache(cache_folder())  # what is loaded from here runs as this user
    if not _claim(cache, name):
        with _locked(cache.folder):
            if not _claim(cache, name):  # another process has built it meanwhile
                _build(cache, folder, sources, name)
                if not _claim(cache, name):
                    raise RuntimeError(f"{cache.folder / name} changed while it was built")
                cache.remove_old(NUM_KEPT, pattern="kernels-*.so")
    return cache.folder / name


def _claim(cache: PrivateCache, name: str) -> bool:
    """Whether it is there and whole. Then it counts as used, and is locked until this process ends."""
    descriptor = cache.open_sealed(name)
    if descriptor is None:
        return False
    keep_entry(descriptor)
    cache.note_used(name)
    return True


@contextlib.contextmanager
def _locked(folder: Path) -> Generator[None]:
    """Inside, no other process builds in this folder. Raises RuntimeError when one does for too long."""
    fd = os.open(folder / "build.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + BUILD_TIMEOUT_S
        while not _try_lock(fd):
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"another process has been compiling in {folder} for {BUILD_TIMEOUT_S:g} s"
                )
            time.sleep(_LOCK_RETRY_S)
        yield
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: two may build at once, and each puts a whole file in place
        return True
    return True


def _build(cache: PrivateCache, folder: Path, sources: list[Path], name: str) -> None:
    """Compile, link, seal, and put the library in place in one step."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise RuntimeError("no C++ compiler (g++ or c++) is on PATH")
    _log.warning("compiling the CPU kernels for this machine, once: a minute on two idle cores, or longer")
    # Left by one that was killed: this process has the lock.
    for left in cache.folder.glob(f"{_SCRATCH_PREFIX}*"):
        shutil.rmtree(left, ignore_errors=True)
    with cache.scratch(_SCRATCH_PREFIX) as scratch:
        objects = [str(scratch / f"{source.stem}.o") for source in sources]
        library = scratch / name
        _run_compilers(
            [
                [
                    [compiler, *_FLAGS, "-I", str(folder), "-c", str(source), "-o", output]
                    for source, output in zip(sources, objects, strict=True)
                ],
                [[compiler, "-shared", "-pthread", *objects, "-o", str(library)]],
            ]
        )
        seal_file(library)
        cache.put(library)


def _run_compilers(phases: list[list[list[str]]]) -> None:
    """Run commands, phase by phase. Raises RuntimeError with what the first that fails says."""
    job = {"phases": phases, "num_at_once": len(os.sched_getaffinity(0))}
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(_RUNNER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # a group of its own, which ends with it
    )
    assert process.stdin is not None
    assert process.stdout is not None
    deadline = time.monotonic() + BUILD_TIMEOUT_S
    try:
        process.stdin.write(json.dumps(job).encode() + b"\n")
        process.stdin.flush()  # and stays open: its end is the end of the compilers
        answer = _read_until(process.stdout.fileno(), deadline)
    except BrokenPipeError:
        answer = b""
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdin.close()
        process.stdout.close()
    if answer != OK.encode():
        raise RuntimeError(answer.decode(errors="replace") or "the compilers were killed")


def _read_until(fd: int, deadline: float) -> bytes:
    text = b""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    while poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
        part = os.read(fd, 65536)
        if not part:
            return text
        text += part
    raise RuntimeError(f"the compilers were not done within {BUILD_TIMEOUT_S:g} s")


def _cpu_name() -> str:
    """What -march=native looks at: the processor's model and features."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
