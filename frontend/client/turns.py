"""How any number of threads use one engine client, which a single thread may touch at a time.

Short calls take turns. Of the threads that wait for something the engine says, one receives for all; it holds
no turn while it waits, so nobody waits for a wait. Knows no requests and no text.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Self

from ...ipc.errors import EngineDeadError
from .engine_core_client import SyncClient


class HeldInterrupts:
    """Ctrl-C in the main thread, held back while work is done that must not be left half done.

    Only the interpreter's own handler is replaced meanwhile: whoever has another one knows what it does.
    A second Ctrl-C is not held back.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._is_ours = False
        self._is_open = False
        self._is_pending = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            if self._depth == 0 and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                signal.signal(signal.SIGINT, self._on_interrupt)
                self._is_ours = True
            self._depth += 1
        return self

    def __exit__(self, *_exc_info: object) -> None:
        if threading.current_thread() is threading.main_thread():
            self._depth -= 1
            if self._depth == 0 and self._is_ours:
                self._is_ours = False
                found = signal.signal(signal.SIGINT, signal.default_int_handler)
                if found != self._on_interrupt:  # a debugger's, which has come meanwhile
                    signal.signal(signal.SIGINT, found)
                self._raise_pending()

    def open(self) -> None:
        """Within `with self:`, from here to `close` Ctrl-C may come. Raises one that has come already."""
        if threading.current_thread() is threading.main_thread():
            self._is_open = True
            self._raise_pending()

    def close(self) -> None:
        """From here on it is held back again."""
        if threading.current_thread() is threading.main_thread():
            self._is_open = False

    def _raise_pending(self) -> None:
        if self._is_pending:
            self._is_open = self._is_pending = False
            raise KeyboardInterrupt

    def _on_interrupt(self, _number: int, _frame: FrameType | None) -> None:
        if self._is_open or self._is_pending:
            self._is_open = self._is_pending = False
            raise KeyboardInterrupt
        self._is_pending = True


class _Waiter:
    """A thread in `Turns.wait_for`."""

    def __init__(self, is_served: Callable[[], bool]) -> None:
        self.is_served = is_served
        self.thread = threading.get_ident()
        self._gate = threading.Lock()
        self._gate.acquire()

    def sleep(self, timeout_s: float | None) -> None:
        """Until `wake` has been called since the last `sleep`."""
        self._gate.acquire(timeout=-1 if timeout_s is None else timeout_s)

    def wake(self) -> None:
        """Called within a turn."""
        if self._gate.locked():
            self._gate.release()


class Turns:
    """`with turns:` is a turn at the client, short and reentrant; `wait_for` waits between turns.

    In a fork of the process that made it both raise EngineDeadError, before they wait for any lock: the
    thread that held it does not exist there.
    """

    def __init__(self, client: SyncClient) -> None:
        self._client = client
        self._interrupts = HeldInterrupts()
        self._entrance = threading.Lock()
        self._turn = threading.Lock()
        self._holder: int | None = None  # the thread whose turn it is
        self._depth = 0
        self._receiver: _Waiter | None = None
        self._followers: list[_Waiter] = []
        self._owner_pid = os.getpid()

    @property
    def is_forked(self) -> bool:
        """True in a fork of the process that made this."""
        return os.getpid() != self._owner_pid

    def check_owner(self) -> None:
        """Raise EngineDeadError in a fork."""
        if self.is_forked:
            raise EngineDeadError(
                f"this process is a fork of the one that the engine belongs to (pid {self._owner_pid}); "
                "make an engine, or attach to a daemon, in each process"
            )

    def __enter__(self) -> Self:
        self.check_owner()
        me = threading.get_ident()
        if self._holder == me:
            self._depth += 1
            return self
        self._interrupts.__enter__()
        try:
            with self._entrance:  # who ends a turn and begins another comes after those that wait here
                self._turn.acquire()
        except BaseException:
            self._interrupts.__exit__()
            raise
        self._holder = me
        self._depth = 1
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self._depth -= 1
        if self._depth:
            return
        try:
            if self._receiver is not None and self._receiver.thread != self._holder and self._client.has_news:
                self._client.wake()
        finally:
            self._holder = None
            self._turn.release()
            self._interrupts.__exit__()

    def wait_for(
        self, is_served: Callable[[], bool], receive: Callable[[], bool], timeout_s: float | None = None
    ) -> bool:
        """Wait until `is_served()`; False when the time is over.

        receive: takes in what the engine has said; False if there is nothing more. It is called by whichever
        of the waiting threads receives; what it raises, each of them gets. Both are called within a turn.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        waiter = _Waiter(is_served)
        with self._interrupts:
            try:
                while True:
                    with self:
                        if is_served():
                            return True
                        has_received = self._receiver in (None, waiter) and self._receive(receive)
                        if is_served():
                            return True
                        left_s = None if deadline is None else deadline - time.monotonic()
                        if left_s is not None and left_s <= 0:
                            return False
                        self._line_up(waiter)
                    if not has_received:  # else there may be more, and others may want their turn first
                        self._wait(waiter, left_s)
            finally:
                self._leave(waiter)

    def _wait(self, waiter: _Waiter, timeout_s: float | None) -> None:
        self._interrupts.open()
        try:
            if self._receiver is waiter:
                self._client.wait(timeout_s)
            else:
                waiter.sleep(timeout_s)
        finally:
            self._interrupts.close()

    def _line_up(self, waiter: _Waiter) -> None:
        """`waiter` receives from now on, or follows the one that does."""
        if self._receiver is None:
            self._receiver = waiter
            if waiter in self._followers:
                self._followers.remove(waiter)
        elif self._receiver is not waiter and waiter not in self._followers:
            self._followers.append(waiter)

    def _receive(self, receive: Callable[[], bool]) -> bool:
        has_received = receive()
        for follower in self._followers:
            if follower.is_served():
                follower.wake()
        return has_received

    def _leave(self, waiter: _Waiter) -> None:
        with self:
            if self._receiver is waiter:
                self._receiver = None
            elif waiter in self._followers:
                self._followers.remove(waiter)
            if self._receiver is None and self._followers:
                self._followers[0].wake()  # to receive
