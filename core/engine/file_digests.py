"""Computes the SHA-256 of an engine's files after its start, in the background (file_identity.py).

Each file is read once on this machine, by a process of the lowest scheduling class. A thread does it where
there are few bytes, since a process costs more.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from typing import NoReturn

import msgspec

from ...ipc.decoding import decode_msgpack
from ...ipc.errors import QuireError
from ...ipc.files.file_identity import FileStamp, find_digests, list_unknown
from ...ipc.processes.process import EXIT_OK, ChildProcess, Lifeline, wait_readable
from ...ipc.spec.config import ModelConfig

_log = logging.getLogger(__name__)

_MODULE = "quire.core.engine.file_digests"
_MAX_THREAD_BYTES = 32 << 20  # 30 ms


def start_digests(model: ModelConfig) -> None:
    """Begin in the background, if a file's digest is not known yet."""
    if model.noted is not None:
        threading.Thread(target=_run, args=(model,), name="digests", daemon=True).start()


def _run(model: ModelConfig) -> None:
    assert model.noted is not None
    unknown = list_unknown(model.model, model.tokenizer, model.noted)
    if sum(stamp.size for stamp in unknown.values()) <= _MAX_THREAD_BYTES:
        find_digests(unknown)
        return
    try:
        child = ChildProcess.start(_MODULE, "digests", msgspec.msgpack.encode(unknown))
        wait_readable(child.pid_fd, None)
        child.stop(0.0)
    except (OSError, QuireError) as error:
        _log.debug("no digests: %s", error)


def main() -> NoReturn:
    """Entry point of the process; it ends with the core."""
    lifeline = Lifeline()
    lifeline.watch(grace_s=0.0)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    find_digests(decode_msgpack(lifeline.args, dict[str, FileStamp]))
    os._exit(EXIT_OK)


if __name__ == "__main__":
    main()
