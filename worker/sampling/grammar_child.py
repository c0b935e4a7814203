"""GrammarProcess and ChildMatcher: the worker's side of grammar_process.py.

What goes wrong there (time, memory, a crash, no process to be had) is a ChildError of one row.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import weakref
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from ...ipc.processes.process import ChildProcess
from ...ipc.structured_outputs import COMPILE_S, MASK_S, MAX_MASK_S, find_replay_limit_s
from .grammar_process import ANSWER, END, ENDING_MASK, ERROR, PID, REQUEST, GrammarProcessArgs

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MODULE = "quire.worker.sampling.grammar_process"
# One thread, or it could not fork. What the library says of its panics is in the row's failure.
_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "MALLOC_ARENA_MAX": "1", "RUST_BACKTRACE": "0"}
_START_TIMEOUT_S = 60.0  # the trie of 150,000 tokens takes 2 s
_WALL_FACTOR, _WALL_MARGIN_S = (
    20,
    5.0,
)  # of a limit of processor time, for a process that is stopped or starved


class ChildError(Exception):
    """A row's grammar can be followed no further; the text says why. `is_late`: a mask took MAX_MASK_S."""

    def __init__(self, text: str, is_late: bool = False) -> None:
        self.is_late = is_late
        super().__init__(text)


class GrammarProcess:
    """The process that forks one for each row; started by the constructor. Raises OSError."""

    def __init__(self, tokenizer: str, vocab_size: int, eos_token_ids: list[int]) -> None:
        self._control, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(_START_TIMEOUT_S)
        with its_end:
            args = GrammarProcessArgs(tokenizer, vocab_size, eos_token_ids, its_end.fileno())
            payload, fds = msgspec.msgpack.encode(args), (args.socket_fd,)
            self._child = ChildProcess.start(_MODULE, "grammars", payload, _ENVIRONMENT, pass_fds=fds)
        self.close = weakref.finalize(self, _end, self._control, self._child)  # idempotent

    @property
    def pid(self) -> int:
        """Its own, not those of rows."""
        return self._child.pid

    @property
    def has_ended(self) -> bool:
        """Whether another one is needed for new rows."""
        return self._child.exit_code is not None

    def start_row(self, row_end: socket.socket) -> int:
        """The pid of a new process that has this end of a pair. Raises ChildError."""
        with contextlib.suppress(OSError):
            socket.send_fds(self._control, [b"+"], [row_end.fileno()])
            answer = self._control.recv(PID.size)
            if answer and (pid := PID.unpack(answer)[0]):
                return pid
        raise ChildError(f"there is no process for it: {self._child.describe_exit()}")

    def find_end(self, pid: int) -> tuple[int | None, int]:
        """The exit code of a row's process that has ended, negative for a signal, and its processor time in
        us. None and 0 if nobody knows.
        """
        with contextlib.suppress(OSError):
            self._control.send(PID.pack(pid))
            if answer := self._control.recv(END.size):
                return END.unpack(answer)
        return None, 0

    def kill_row(self, pid: int) -> None:
        """End a row's process at once."""
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)  # it has its pid until it is reaped
            self._control.send(PID.pack(-pid))


def _end(control: socket.socket, child: ChildProcess) -> None:
    """Rows that have a process keep it."""
    control.close()
    child.stop(0.0)


class ChildMatcher:
    """A row's matcher in a process of its own, which ends with this object. `work_us`: of its last answer."""

    def __init__(self, parent: GrammarProcess) -> None:
        self._parent, self.work_us = parent, 0
        self._left_s, self._start_s, self._total_us = MAX_MASK_S, 0.0, 0
        self._socket, its_end = socket.socketpair()
        with its_end:
            self._pid = parent.start_row(its_end)
        self._answers = self._socket.makefile("rb")

    def ask(self, token_ids: list[int], text: str = "") -> None:
        """Have it go on by tokens, and compute the mask after them. text: of the grammar, when it starts."""
        packed, encoded = np.array(token_ids, dtype=np.int32).tobytes(), text.encode()
        self._left_s = min(MAX_MASK_S, self._left_s + MASK_S)
        self._start_s = COMPILE_S + find_replay_limit_s(len(token_ids)) if text else 0.0
        self._socket.settimeout((self._start_s + self._left_s) * _WALL_FACTOR + _WALL_MARGIN_S)
        header = REQUEST.pack(self._left_s, len(encoded), len(token_ids))
        with contextlib.suppress(OSError):  # its end is seen in `receive`
            self._socket.sendall(header + encoded + packed)

    def receive(self, mask: NDArray[np.int32]) -> bool:
        """Wait for the mask that was asked for; whether the output may end here. Raises ChildError."""
        try:
            header = self._answers.read(ANSWER.size)
        except TimeoutError:
            raise ChildError("the process that follows it does not answer") from None
        except OSError:
            header = b""  # it has ended with a request unread
        if len(header) < ANSWER.size:
            raise self._explain_end()
        kind, self.work_us, mask_us, size = ANSWER.unpack(header)
        self._total_us += self.work_us
        self._left_s = max(0.0, self._left_s - mask_us * 1e-6)
        body = self._answers.read(size)
        if kind == ERROR:
            raise ChildError(body.decode())
        mask.view(np.uint8)[:] = np.frombuffer(body, dtype=np.uint8)
        return kind == ENDING_MASK

    def _explain_end(self) -> ChildError:
        code, work_us = self._parent.find_end(self._pid)
        self._pid, self.work_us = 0, max(0, work_us - self._total_us)
        if code == -signal.SIGPROF:
            start = (
                f" (and {self._start_s:.1f} s for its text and the output so far)" if self._start_s else ""
            )
            return ChildError(
                f"to find what may come next took more than {self._left_s * 1e3:.0f} ms of processor time"
                f"{start}; a token may take {MASK_S * 1e3:.0f} ms on average, "
                f"and {MAX_MASK_S * 1e3:.0f} ms once",
                is_late=self._left_s == MAX_MASK_S,
            )
        by = "" if code is None else f" by {signal.Signals(-code).name}" if code < 0 else f" with code {code}"
        return ChildError(f"the process that followed it ended{by}")

    def __del__(self) -> None:
        if pid := getattr(self, "_pid", 0):
            self._parent.kill_row(pid)
            self._answers.close()
        self._socket.close()
