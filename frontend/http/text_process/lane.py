"""TextLane: jobs of many tenants, the TextProcess that does them, what ends it. Knows no kinds of jobs."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar, cast

import msgspec

from ....ipc.errors import FilesChangedError
from ....ipc.files.file_identity import Stamps, check_files
from ....ipc.network.served_files import find_tokenizer_files
from ....ipc.processes.process import ChildProcess
from ...text.bounded_jobs import MEMORY_EXITS, WALL_FACTOR, WALL_MARGIN_S, FrameReader, make_frame
from .jobs import Ready, TextAnswer, TextArgs, decode_answer

# TurnQueue: a queue in which owners take turns, each with a bound on what waits. Pure.

T = TypeVar("T")


class TurnQueueFullError(Exception):
    """An owner has as much waiting as it may; the text has the numbers."""


@dataclass(slots=True)
class _Line(Generic[T]):
    """What one owner has waiting: items with their sizes."""

    items: deque[tuple[T, int]] = field(default_factory=deque[tuple[T, int]])
    size_bytes: int = 0


class TurnQueue(Generic[T]):
    """Items of several owners: each owner's in their order, and one of each owner in turn.

    max_items, max_bytes: what one owner may have waiting. max_total_bytes: what all may; past it only those
    are refused who have more than an equal part.
    """

    def __init__(self, max_items: int, max_bytes: int, max_total_bytes: int) -> None:
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._max_total_bytes = max_total_bytes
        self._lines: OrderedDict[str, _Line[T]] = OrderedDict()  # the next owner first; none is empty

    def __bool__(self) -> bool:
        return bool(self._lines)

    def __iter__(self) -> Iterator[T]:
        return (item for line in self._lines.values() for item, _ in line.items)

    def put(self, owner: str, item: T, size_bytes: int) -> None:
        """Add an item. Raises TurnQueueFullError; an owner with nothing waiting may add one of any size."""
        line = self._lines.get(owner) or _Line[T]()
        if len(line.items) >= self._max_items:
            raise TurnQueueFullError(f"{len(line.items)} wait, and at most {self._max_items} may")
        limit = self._max_bytes
        total = sum(other.size_bytes for other in self._lines.values())
        if total + size_bytes > self._max_total_bytes:
            limit = min(limit, self._max_total_bytes // (len(self._lines) + (owner not in self._lines)))
        if line.items and line.size_bytes + size_bytes > limit:
            raise TurnQueueFullError(f"{line.size_bytes} bytes wait, and at most {limit} may")
        line.items.append((item, size_bytes))
        line.size_bytes += size_bytes
        self._lines[owner] = line

    def put_back(self, items: Iterable[tuple[str, T, int]]) -> None:
        """Return (owner, item, size) that were taken last, in their order: they are the next ones."""
        for owner, item, size_bytes in reversed(list(items)):
            line = self._lines.setdefault(owner, _Line[T]())
            line.items.appendleft((item, size_bytes))
            line.size_bytes += size_bytes
            self._lines.move_to_end(owner, last=False)

    def take(self) -> T | None:
        """The next item, None if there is none. Its owner's next turn is after all others'."""
        if not self._lines:
            return None
        owner, line = next(iter(self._lines.items()))
        item, size_bytes = line.items.popleft()
        line.size_bytes -= size_bytes
        if line.items:
            self._lines.move_to_end(owner)
        else:
            del self._lines[owner]
        return item

    def remove(self, owner: str, item: T) -> None:
        """Take out an item that nobody waits for any more; nothing happens if it is not there."""
        line = self._lines.get(owner)
        entry = None if line is None else next((queued for queued in line.items if queued[0] is item), None)
        if line is None or entry is None:
            return
        line.items.remove(entry)
        line.size_bytes -= entry[1]
        if not line.items:
            del self._lines[owner]


_START_TIMEOUT_S = 120.0  # until it is ready; half of it may be processor time
_MAX_STARTS = 2  # that fail in a row, before those who wait are told
_logger = logging.getLogger("quire.serve")
TEXT_MODULE = "quire.frontend.http.text_process"
# One thread a process is what its limits are for: threads would reserve address space and hide from the nice.
_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "MALLOC_ARENA_MAX": "1", "RUST_BACKTRACE": "0"}


class EndedBy(Enum):
    """What ended the process under a job."""

    TIME = "time"  # its own limit of processor time, or the clock
    MEMORY = "memory"  # as one does that is refused memory where nothing can catch that
    LOSS = "loss"  # nothing that is known of the job


class TextProcess(asyncio.Protocol):
    """One text process, which is started by the constructor (a millisecond; OSError when it cannot be, and
    FilesChangedError).

    on_body is given the body of each frame that it sends, of which the first says that it is ready; on_end is
    called once, when it has ended. Both in the event loop, and not after `close`.
    """

    def __init__(
        self,
        tokenizer: str,
        chat_template: str | None,
        noted: Stamps | None,
        is_background: bool,
        on_body: Callable[[bytes], None],
        on_end: Callable[[], None],
    ) -> None:
        self._on_body = on_body
        self._on_end = on_end
        self._tokenizer, self._noted, self._is_checked = tokenizer, noted, False
        self._check_files()
        self._frames = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._socket, its_end = socket.socketpair()
        args = TextArgs(
            tokenizer=tokenizer,
            chat_template=chat_template,
            socket_fd=its_end.fileno(),
            is_background=is_background,
        )
        payload = msgspec.msgpack.encode(args)
        try:
            with its_end:
                fds = (args.socket_fd,)
                self._child = ChildProcess.start(TEXT_MODULE, "text", payload, _ENVIRONMENT, pass_fds=fds)
        except BaseException:
            self._socket.close()
            raise
        loop = asyncio.get_running_loop()
        loop.add_reader(self._child.pid_fd, self._end)
        self._connecting = asyncio.ensure_future(self._connect(loop))

    @property
    def pid(self) -> int:
        """The child's."""
        return self._child.pid

    @property
    def ended_by(self) -> EndedBy:
        """What has ended it, of a job that it may have had."""
        if self._child.exit_code == -signal.SIGPROF:
            return EndedBy.TIME
        return EndedBy.MEMORY if self._child.exit_code in MEMORY_EXITS else EndedBy.LOSS

    def describe_exit(self) -> str:
        """How it ended, for a person."""
        return self._child.describe_exit()

    def send(self, frame: bytes) -> None:
        """Hand it a job; only after it has said that it is ready."""
        assert self._transport is not None
        self._transport.write(frame)

    def kill(self, because: str) -> None:
        """SIGKILL; on_end is called when it has ended."""
        self._child.kill(because)

    def close(self) -> None:
        """End it at once. Idempotent."""
        if self._child.pid_fd >= 0:
            asyncio.get_running_loop().remove_reader(self._child.pid_fd)
        self._child.kill("its server ends")
        self._child.stop(0.0)
        self._connecting.cancel()
        if self._transport is not None:
            self._transport.abort()
        else:
            self._socket.close()

    async def _connect(self, loop: asyncio.AbstractEventLoop) -> None:
        self._socket.setblocking(False)
        await loop.create_unix_connection(lambda: self, sock=self._socket)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Of asyncio.Protocol: the child's socket can be written to."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Of asyncio.Protocol: hands on the messages that are whole."""
        if not self._is_checked:  # it has read its files, which may have been replaced meanwhile
            self._is_checked = True
            try:
                self._check_files()
            except FilesChangedError as error:
                self.kill(str(error))
                return
        for body, _ in self._frames.feed(data):
            self._on_body(body)

    def _check_files(self) -> None:
        """Raise FilesChangedError if what it reads is not the engine's tokenizer any more."""
        if self._noted is not None:
            check_files(self._tokenizer, self._noted, find_tokenizer_files(self._tokenizer))

    def _end(self) -> None:
        self.close()
        self._on_end()


class JobEndedError(Exception):
    """The process ended while it did this job; the text says how."""

    def __init__(self, by: EndedBy, text: str) -> None:
        self.by = by
        super().__init__(text)


class TextUnavailableError(Exception):
    """No text process can be had; the text says why."""


# (on_body, on_end) -> a process that has been started and will say that it is ready. Raises OSError.
MakeProcess = Callable[[Callable[[bytes], None], Callable[[], None]], TextProcess]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneLimits:
    """limit_s: processor time of a job. max_jobs, max_bytes, max_total_bytes: see TurnQueue.

    max_sent: jobs that the process has at a time, all but the first in its socket. idle_s: a process that has
    had nothing to do for so long is ended; None for never.
    """

    limit_s: float
    max_sent: int
    idle_s: float | None
    max_jobs: int = 4096
    max_bytes: int = 32 << 20  # four bodies of the largest size
    max_total_bytes: int = 256 << 20


@dataclass(slots=True, eq=False)
class _Job:
    tenant: str
    body: bytes
    answer: asyncio.Future[TextAnswer]


class TextLane:
    """Does jobs one after the other, tenants in turn. For one event loop.

    The process is started by `start` or the first job, and again when it has ended under a job: that one
    fails, and those behind it are done by the next process.
    """

    def __init__(self, limits: LaneLimits, make_process: MakeProcess) -> None:
        self._limits = limits
        self._make_process = make_process
        self._waiting: TurnQueue[_Job] = TurnQueue(limits.max_jobs, limits.max_bytes, limits.max_total_bytes)
        self._sent: deque[_Job] = deque()  # the first is being done
        self._process: TextProcess | None = None
        self._is_ready = False
        self._is_closed = False
        self._is_retiring = False  # it is being ended because it had nothing to do
        self._overdue: str | None = None  # what it is being killed for
        self._num_failed_starts = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int | None:
        """The process that does the jobs now, None if there is none."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process, without waiting until it is ready, unless there is one."""
        if self._process is not None or self._is_closed:
            return
        try:
            self._process = self._make_process(self._take_body, self._take_end)
        except (OSError, FilesChangedError) as error:  # no descriptors, no processes, other files
            self._fail_all(f"no process can be started: {error}")
            return
        self._arm(_START_TIMEOUT_S, f"it did not start within {_START_TIMEOUT_S:g} s")

    async def run(self, body: bytes, tenant: str) -> TextAnswer:
        """The answer to a job. Raises JobEndedError, TextUnavailableError, TurnQueueFullError."""
        if self._is_closed:
            raise TextUnavailableError("the server is about to end")
        job = _Job(tenant, body, asyncio.get_running_loop().create_future())
        self._waiting.put(tenant, job, len(body))
        self._send_jobs()
        try:
            return await job.answer
        except asyncio.CancelledError:
            self._waiting.remove(tenant, job)
            self._abandon(job)
            raise

    def close(self) -> None:
        """End the process; who waits gets TextUnavailableError. Idempotent."""
        self._is_closed = True
        self._disarm()
        if self._process is not None:
            self._process.close()
            self._process = None
        self._fail_all("the server is about to end")

    def _abandon(self, job: _Job) -> None:
        """Nobody waits for this job any more; one that takes long is not worth finishing."""
        is_long = self._limits.idle_s is not None
        if is_long and self._process is not None and self._sent and self._sent[0] is job:
            self._process.kill("the client whose text it worked on has left")

    def _send_jobs(self) -> None:
        if self._process is None or not self._is_ready:
            self.start()
            return
        while self._waiting and len(self._sent) < self._limits.max_sent:
            job = self._waiting.take()
            if job is None or job.answer.done():
                continue
            self._sent.append(job)
            self._process.send(make_frame(job.body, self._limits.limit_s))
            if len(self._sent) == 1:
                self._arm_for_job()
        if not self._sent and self._limits.idle_s is not None:
            self._arm(self._limits.idle_s, None)

    def _take_body(self, body: bytes) -> None:
        answer = decode_answer(body)
        if isinstance(answer, Ready):
            self._disarm()
            self._is_ready = True
            self._num_failed_starts = 0
        elif self._sent:
            job = self._sent.popleft()
            if not job.answer.done():
                job.answer.set_result(answer)
            self._arm_for_job()
        self._send_jobs()

    def _take_end(self) -> None:
        """The process has ended: by its own limits, by `_on_deadline`, or by what nobody here knows."""
        self._disarm()
        process, self._process = self._process, None
        assert process is not None
        was_ready, self._is_ready = self._is_ready, False
        was_retired, self._is_retiring = self._is_retiring, False
        sent, self._sent = self._sent, deque()
        if sent:
            self._fail_first(sent.popleft(), process)
            self._waiting.put_back((job.tenant, job, len(job.body)) for job in sent)
        elif not was_ready and not was_retired:
            self._note_failed_start(process.describe_exit())
        self._overdue = None
        if self._waiting or (was_ready and self._limits.idle_s is None):
            self.start()

    def _fail_first(self, job: _Job, process: TextProcess) -> None:
        if job.answer.done():  # abandoned
            return
        by = process.ended_by if self._overdue is None else EndedBy.TIME
        _logger.warning(
            "%s under a job (%s); the next job has another one", process.describe_exit(), by.value
        )
        job.answer.set_exception(JobEndedError(by, process.describe_exit()))

    def _note_failed_start(self, why: str) -> None:
        _logger.error("%s while it started", why)
        self._num_failed_starts += 1
        if self._num_failed_starts >= _MAX_STARTS:
            self._num_failed_starts = 0
            self._fail_all(f"the model's tokenizer cannot be run in a process of its own: {why}")

    def _fail_all(self, why: str) -> None:
        jobs = [*self._sent, *self._waiting]
        self._sent.clear()
        while self._waiting:
            self._waiting.take()
        for job in jobs:
            if not job.answer.done():
                job.answer.set_exception(TextUnavailableError(why))

    def _arm_for_job(self) -> None:
        """The clock's limit for the first job: it is for a process that is stopped or starved."""
        if self._sent:
            wall_s = self._limits.limit_s * WALL_FACTOR + WALL_MARGIN_S
            self._arm(wall_s, f"a text was not done after {wall_s:g} s")
        else:
            self._disarm()

    def _arm(self, delay_s: float, because: str | None) -> None:
        self._disarm()
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_deadline, because)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_deadline(self, because: str | None) -> None:
        """Kill what is late, or has had nothing to do (without a reason)."""
        if self._process is None:
            return
        if because is None:
            self._is_retiring, self._is_ready = True, False
        self._overdue = because
        self._process.kill(because or "it had nothing to do")
