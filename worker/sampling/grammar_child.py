"""GrammarProcess, GrammarTemplate and ChildMatcher: the worker's side of grammar_process.py.

What goes wrong there (time, memory, a crash, no process to be had) is a ChildError of one row.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import tempfile
import weakref
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from ...ipc.params.structured_outputs import COMPILE_S, MASK_S, MAX_MASK_S, find_replay_limit_s
from ...ipc.processes.process import ChildProcess
from .grammar_process import ANSWER, COMPILED, END, ENDING_MASK, ERROR, PID, REQUEST, GrammarProcessArgs

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MODULE = "quire.worker.sampling.grammar_process"
# One thread, or it could not fork. What the library says of its panics is in the row's failure.
_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "MALLOC_ARENA_MAX": "1", "RUST_BACKTRACE": "0"}
_CRASHES = (-signal.SIGSEGV, -signal.SIGABRT)  # the stack is full, or the memory
_START_TIMEOUT_S = 60.0  # the trie of 150,000 tokens takes 2 s
# Of a limit of processor time, for a process that is stopped or starved.
_WALL_FACTOR, _WALL_MARGIN_S = 20, 5.0


class ChildError(Exception):
    """A row's grammar can be followed no further; the text says why.

    work_us: processor time until then. would_recur: the same is to be expected of other rows with the text.
    """

    def __init__(self, text: str, work_us: int = 0, would_recur: bool = False) -> None:
        self.work_us, self.would_recur = work_us, would_recur
        super().__init__(text)


class _Forker:
    """A process that forks others."""

    def __init__(self, timeout_s: float) -> None:
        self._control, self._its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(timeout_s)

    def fork(self, *fds: int) -> int:
        """The pid of a new process, 0 if there is none."""
        with contextlib.suppress(OSError):
            socket.send_fds(self._control, [b"+"], fds)
            if answer := self._control.recv(PID.size):
                return PID.unpack(answer)[0]
        return 0

    def find_end(self, pid: int) -> tuple[int | None, int]:
        """The exit code of a forked process that has ended, negative for a signal, and its processor time in
        us. None and 0 if nobody knows.
        """
        with contextlib.suppress(OSError):
            self._control.send(PID.pack(pid))
            if answer := self._control.recv(END.size):
                return END.unpack(answer)
        return None, 0

    def kill(self, pid: int) -> None:
        """End a forked process at once."""
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)  # it has its pid until it is reaped
            self._control.send(PID.pack(-pid))


class GrammarProcess(_Forker):
    """The process that has the trie, and forks one for each text; starts with this object. Raises OSError."""

    def __init__(self, tokenizer: str, vocab_size: int, eos_token_ids: list[int]) -> None:
        super().__init__(_START_TIMEOUT_S)
        with self._its_end as its_end:
            args = GrammarProcessArgs(tokenizer, vocab_size, eos_token_ids, its_end.fileno())
            payload, fds = msgspec.msgpack.encode(args), (args.socket_fd,)
            self._child = ChildProcess.start(_MODULE, "grammars", payload, _ENVIRONMENT, pass_fds=fds)
        self.close = weakref.finalize(self, _end_process, self._control, self._child)  # idempotent

    @property
    def pid(self) -> int:
        """Its own."""
        return self._child.pid

    @property
    def has_ended(self) -> bool:
        """Whether new texts need another one."""
        return self._child.exit_code is not None


class GrammarTemplate(_Forker):
    """The process that has compiled a text, and forks one for each row; ends with this object.

    The constructor does not wait for it. Raises ChildError, OSError.
    """

    def __init__(self, parent: GrammarProcess, text: str) -> None:
        super().__init__(COMPILE_S * _WALL_FACTOR + _WALL_MARGIN_S)
        self._parent, self.has_ended = parent, False
        self._compiled_us: int | None = None
        with self._its_end as its_end, tempfile.TemporaryFile() as file:
            file.write(text.encode())
            file.seek(0)
            self._pid = parent.fork(its_end.fileno(), file.fileno())
        if not self._pid:
            self._control.close()
            raise ChildError("no process can be started for it")
        self.close = weakref.finalize(self, _end_template, self._control, parent, self._pid)  # idempotent

    def wait(self) -> int:
        """Wait until the text is compiled; processor time that it took, in us. Raises ChildError."""
        if self._compiled_us is None:
            with contextlib.suppress(OSError):
                if answer := self._control.recv(COMPILED.size):
                    (self._compiled_us,) = COMPILED.unpack(answer)
        if self._compiled_us is None:
            raise self.explain_end()
        return self._compiled_us

    def explain_end(self) -> ChildError:
        """Why it forks no row's process."""
        code, work_us = self._parent.find_end(self._pid)
        self.close.detach()
        self._control.close()
        self.has_ended = True
        if code == -signal.SIGPROF:
            reason = f"it takes more than {COMPILE_S:g} s of processor time to compile"
            return ChildError(reason, work_us, would_recur=True)
        reason = f"the process that compiles it ended{_describe_exit(code)}"
        return ChildError(reason, work_us, would_recur=code in _CRASHES)


def _end_process(control: socket.socket, child: ChildProcess) -> None:
    """Templates and rows that have a process keep it."""
    control.close()
    child.stop(0.0)


def _end_template(control: socket.socket, parent: GrammarProcess, pid: int) -> None:
    control.close()
    parent.kill(pid)


def _describe_exit(code: int | None) -> str:
    return "" if code is None else f" by {signal.Signals(-code).name}" if code < 0 else f" with code {code}"


class ChildMatcher:
    """A row's matcher in a process of its own, which ends with this object. `work_us`: of its last answer.

    Raises ChildError, OSError.
    """

    def __init__(self, template: GrammarTemplate) -> None:
        self._template, self._pid = template, 0
        self._left_s, self._total_us = MAX_MASK_S, 0
        self._socket, its_end = socket.socketpair()
        with its_end:
            template.wait()
            self._pid = template.fork(its_end.fileno())
        if not self._pid:
            raise template.explain_end()
        self._answers = self._socket.makefile("rb")

    def ask(self, token_ids: list[int]) -> None:
        """Have it go on by tokens, and compute the mask after them."""
        self._left_s = min(MAX_MASK_S, self._left_s + MASK_S)
        limit_s = self._left_s + find_replay_limit_s(len(token_ids))
        self._socket.settimeout(limit_s * _WALL_FACTOR + _WALL_MARGIN_S)
        header = REQUEST.pack(self._left_s, len(token_ids))
        with contextlib.suppress(OSError):  # its end is seen in `receive`
            self._socket.sendall(header + np.array(token_ids, dtype=np.int32).tobytes())

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
            raise ChildError(body.decode(), self.work_us)
        mask.view(np.uint8)[:] = np.frombuffer(body, dtype=np.uint8)
        return kind == ENDING_MASK

    def _explain_end(self) -> ChildError:
        code, work_us = self._template.find_end(self._pid)
        self._pid, self.work_us = 0, max(0, work_us - self._total_us)
        if code == -signal.SIGPROF:
            return ChildError(
                f"to find what may come next took more than {self._left_s * 1e3:.0f} ms of processor time; "
                f"a token may take {MASK_S * 1e3:.0f} ms on average, and {MAX_MASK_S * 1e3:.0f} ms once",
                self.work_us,
                would_recur=self._left_s == MAX_MASK_S,
            )
        return ChildError(f"the process that followed it ended{_describe_exit(code)}", self.work_us)

    def __del__(self) -> None:
        if self._pid:
            self._template.kill(self._pid)
        with contextlib.suppress(AttributeError):  # of one that was never made
            self._answers.close()
        self._socket.close()
