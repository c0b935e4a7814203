"""Children that are forked of the process that starts them, where a new interpreter would be started.

To import what a core needs takes a new one 0.25 s, three quarters of what a fake core computes in its life.
A forked child leaves behind what a new interpreter would not have, and is killed and waited for as one.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import logging
import os
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from quire.ipc.processes import process

MODULES = ("fake_core", "fake_rank", "fake_process", "poisoned_fake")


class ForkedProcess:
    """A child that runs `main` of a module, with what ChildProcess uses of a `subprocess.Popen`."""

    def __init__(
        self,
        args: list[str],
        *,
        env: Mapping[str, str] = os.environ,
        pass_fds: tuple[int, ...] = (),
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> None:
        main = importlib.import_module(args[0]).main  # here, once for all children
        reader, writer = os.pipe()
        self.args, self.returncode = args, None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on, with threads
            self.pid = os.fork()
        if self.pid == 0:
            _begin_anew(args, env, pass_fds, (reader, stdout, stderr))
            _run(main)
        os.close(reader)
        self.stdin = open(writer, "wb", buffering=0)  # noqa: SIM115

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self) -> int | None:
        return self._wait(0)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            with contextlib.suppress(ChildProcessError):  # a test has waited for it
                pid, status = os.waitpid(self.pid, options)
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def fork_children() -> SimpleNamespace:
    """What takes the place of `subprocess` where children are started: those of MODULES are forked."""

    def start(command: list[str], **options: Any) -> object:
        args = command[3:]  # as module_command makes it
        if args[0] not in MODULES:
            return subprocess.Popen(command, **options)
        names = ("env", "pass_fds", "stdout", "stderr")
        return ForkedProcess(args, **{name: options[name] for name in names})

    return SimpleNamespace(Popen=start, PIPE=subprocess.PIPE)


def patch_process() -> None:
    """Fork children from now on, in a process that is a test's as a whole."""
    process.subprocess = fork_children()  # type: ignore[assignment]


def _begin_anew(
    args: list[str], env: Mapping[str, str], pass_fds: tuple[int, ...], streams: tuple[int | None, ...]
) -> None:
    gc.freeze()  # nothing of the parent's is finalized here
    os.setsid()
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    faulthandler.disable()
    for place, fd in enumerate(streams):
        if fd is not None:
            os.dup2(fd, place)
    # Their numbers stay taken: when this process forks, libuv closes what it had by number, whoever has it.
    null = os.open(os.devnull, os.O_RDWR)
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd != null and fd not in pass_fds:
            os.dup2(null, fd, inheritable=False)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    logging.root.handlers.clear()
    warnings.simplefilter("ignore")
    threading.excepthook, sys.unraisablehook = threading.__excepthook__, sys.__unraisablehook__
    os.environ.update(env)
    sys.argv = args
    _show(args)
    # Who looks for what is left of a test sees the environment of the parent.
    os.chdir(os.environ.get("XDG_RUNTIME_DIR", "."))


def _show(args: list[str]) -> None:
    """Let the command line be `... -m MODULE ROLE`, by which others know a child, where there is room for it.

    The kernel shows the memory that the parent's was in: what is written there is padded at its beginning.
    """
    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    words = b"\0".join([b"-m", *map(str.encode, args), b""])
    if (num_free := end - begin - len(words) - 1) > 0:
        ctypes.memmove(begin, b"/" * num_free + b"\0" + words, end - begin)


def _run(main: Any) -> NoReturn:
    code: Any = 1
    try:
        main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code or 0)
