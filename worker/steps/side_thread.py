"""SideThread: a part of a step that another thread does while the caller is in native code.

It knows nothing of steps. A thread that comes late, on busy cores, costs nothing: what it has not begun when
the result is asked for, the caller does.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")


class SideJob(Generic[Result]):
    """Work that is done once, by whoever comes to it first."""

    def __init__(self, work: Callable[[], Result]) -> None:
        self._work = work
        self._is_taken, self._is_running = threading.Lock(), threading.Lock()
        self._is_running.acquire()  # until the work is done
        self._results: list[Result] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        """Do the work if nobody has begun it."""
        if not self._is_taken.acquire(blocking=False):
            return
        try:
            self._results.append(self._work())
        except BaseException as error:
            self._error = error
        finally:
            self._is_running.release()

    def wait(self) -> Result:
        """What the work returns; raises what it raises."""
        self.run()
        with self._is_running:
            pass
        if self._error is not None:
            raise self._error
        return self._results[0]

    def drop(self) -> None:
        """Nobody needs the result: when this returns the work is done or will never be."""
        if not self._is_taken.acquire(blocking=False):
            with self._is_running:
                pass


class SideThread:
    """One thread, started with the first job; it ends with this object."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[SideJob[Any] | None] = SimpleQueue()
        self._is_started = False

    def start(self, work: Callable[[], Result]) -> SideJob[Result]:
        """Have `work` done beside the caller, who waits for the job, or drops it, before the next one."""
        if not self._is_started:
            self._is_started = True
            threading.Thread(target=_serve, args=(self._jobs,), name="side", daemon=True).start()
            weakref.finalize(self, self._jobs.put, None)
        job = SideJob(work)
        self._jobs.put(job)
        return job


def _serve(jobs: SimpleQueue[SideJob[Any] | None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()
        del job
