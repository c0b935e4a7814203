"""The C++ kernels' shared library: compiled once per machine and source, and kept in a folder of the user's.

Several processes may want it at once and each may be killed at any moment. One compiles (the folder's lock),
in a folder that the next one removes if it was left; a library comes into place whole, and is trusted only
if its last bytes are the checksum of the others: loading a truncated one is a SIGBUS. Old ones are removed,
but none that a process has loaded: it holds a lock on the file.
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
import tempfile
import time
from collections.abc import Generator
from pathlib import Path

from .run_compilers import OK

_log = logging.getLogger(__name__)

_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-pthread")
BUILD_TIMEOUT_S = 600.0  # on one slow core; of a wait for another process that builds, too
NUM_KEPT = 8  # of the libraries, by when they were loaded last
_LOCK_RETRY_S = 0.1
_SCRATCH_PREFIX = "build-"
_SEAL = b"quire-sha256:"  # then the digest; ELF does not look at what follows its sections
_SEAL_BYTES = len(_SEAL) + hashlib.sha256().digest_size
_RUNNER = Path(__file__).with_name("run_compilers.py")


def cache_folder() -> Path:
    """Where compiled kernels are kept: $XDG_CACHE_HOME/quire or ~/.cache/quire."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "quire"


def build_library() -> Path:
    """The library's file, compiled now unless a run on the same kind of machine left it whole.

    It is not removed while this process lives. Raises OSError or RuntimeError with the cause.
    """
    folder = Path(__file__).parent
    sources = sorted(folder.glob("*.cpp"))
    digest = hashlib.sha256("\0".join((*_FLAGS, _cpu_name())).encode())
    for path in (*sources, *sorted(folder.glob("*.h"))):
        digest.update(path.read_bytes())
    target = cache_folder() / f"kernels-{digest.hexdigest()[:24]}.so"
    _check_private(target.parent)
    if not _claim(target):
        with _locked(target.parent):
            if not _claim(target):  # another process has built it meanwhile
                _log.info("compiling the CPU kernels for this machine, which is done once")
                _build(sources, target)
                if not _claim(target):
                    raise RuntimeError(f"{target} changed while it was built")
                with contextlib.suppress(OSError):
                    _remove_old(target.parent)
    return target


def _check_private(folder: Path) -> None:
    """What is loaded from here runs as this user, so nobody else may write here."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise RuntimeError(f"{folder} belongs to another user or others may write to it")


def _claim(library: Path) -> bool:
    """Whether it is there and whole. Then it counts as used, and is locked until this process ends."""
    try:
        fd = os.open(library, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    if not _is_whole(fd):
        os.close(fd)
        return False
    with contextlib.suppress(OSError):  # a cache that may only be read, or whose file system has no locks
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        os.utime(library)
    return True


def _is_whole(fd: int) -> bool:
    size = os.fstat(fd).st_size - _SEAL_BYTES
    content, seal = os.pread(fd, max(0, size), 0), os.pread(fd, _SEAL_BYTES, max(0, size))
    return seal == _SEAL + hashlib.sha256(content).digest()


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


def _build(sources: list[Path], target: Path) -> None:
    """Compile, link, seal, and put the library in place in one step."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise RuntimeError("no C++ compiler (g++ or c++) is on PATH")
    # Left by one that was killed: this process has the lock.
    for left in target.parent.glob(f"{_SCRATCH_PREFIX}*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_SCRATCH_PREFIX, dir=target.parent) as scratch:
        objects = [str(Path(scratch) / f"{source.stem}.o") for source in sources]
        library = Path(scratch) / target.name
        _run_compilers(
            [
                [
                    [compiler, *_FLAGS, "-c", str(source), "-o", output]
                    for source, output in zip(sources, objects, strict=True)
                ],
                [[compiler, "-shared", "-pthread", *objects, "-o", str(library)]],
            ]
        )
        with library.open("r+b") as file:
            digest = hashlib.sha256(file.read()).digest()
            file.write(_SEAL + digest)
            file.flush()
            os.fsync(file.fileno())
        library.replace(target)


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
        said = _read_until(process.stdout.fileno(), deadline)
    except BrokenPipeError:
        said = b""
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdin.close()
        process.stdout.close()
    if said != OK.encode():
        raise RuntimeError(said.decode(errors="replace") or "the compilers were killed")


def _read_until(fd: int, deadline: float) -> bytes:
    said = b""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    while poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
        part = os.read(fd, 65536)
        if not part:
            return said
        said += part
    raise RuntimeError(f"the compilers were not done within {BUILD_TIMEOUT_S:g} s")


def _remove_old(folder: Path) -> None:
    """Remove libraries that were not loaded for long, but none that a process has loaded."""
    libraries = sorted(folder.glob("kernels-*.so"), key=lambda path: path.lstat().st_mtime)
    for path in libraries[:-NUM_KEPT]:
        with contextlib.suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def _cpu_name() -> str:
    """What -march=native looks at: the processor's model and features."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
