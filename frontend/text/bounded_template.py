"""A model's chat template, rendered within bounds of time and memory whatever it does.

A template is code of whoever made the model: a loop without end or a text of gigabytes ends a process that
does nothing else, not its caller. Without Jinja, which only that process imports.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import msgspec

from ...ipc.decoding import make_msgpack_decoder
from ...ipc.errors import InputError, ModelError, PromptError, RequestFailedError
from ...ipc.processes.process import ChildProcess, wait_readable
from ..tools import Tool
from .bounded_jobs import (
    MAX_RENDER_S,
    MAX_TEXT_MEMORY_BYTES,
    MEMORY_EXITS,
    WALL_FACTOR,
    WALL_MARGIN_S,
    FrameReader,
    make_frame,
)
from .messages import as_plain

MEMORY_ALLOWED = f"what the chat template renders in {MAX_TEXT_MEMORY_BYTES >> 20} MiB of memory"
_MODULE = "quire.frontend.text.render_process"
_ROLE = "render"
_ENVIRONMENT = {"MALLOC_ARENA_MAX": "1"}
_RECEIVE_BYTES = 1 << 20
_GRACE_S = 1.0
_MAX_AHEAD = 32  # jobs that are sent before the first is answered
_MAX_AHEAD_BYTES = 65536


class TemplateTexts(msgspec.Struct, frozen=True):
    """A ChatTemplate's arguments. tool_use: the text of the one for conversations with tools."""

    source: str
    special_tokens: dict[str, str]
    tool_use: str | None = None


class RenderJob(msgspec.Struct, frozen=True, omit_defaults=True):
    """One `ChatTemplate.render`, or `check_syntax` where messages is None."""

    template: TemplateTexts
    messages: Any
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: dict[str, Any] | None = None
    tools: list[Tool] = []
    param: str = "messages"


class Rendered(msgspec.Struct, frozen=True, tag="rendered"):
    """The text."""

    text: str


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """An InputError."""

    kind: str  # its class's name
    field: str
    value: Any
    allowed: str


Answer = Rendered | Refused
encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder().encode
_decode: Callable[[bytes], Answer] = make_msgpack_decoder(Answer)
_ERRORS: dict[str, type[InputError]] = {"PromptError": PromptError, "ModelError": ModelError}


class RenderProcess:
    """The process that renders, which starts with the first job, or `start`. For any threads.

    max_render_s: processor time of a job; None: MAX_RENDER_S.
    """

    def __init__(self, max_render_s: float | None = None) -> None:
        self._max_render_s = MAX_RENDER_S if max_render_s is None else max_render_s
        self._lock = threading.Lock()
        self._running: _Running | None = None
        self._end_running: Callable[[], object] = bool

    def start(self) -> None:
        """Start it unless it runs, without waiting until it is ready. Raises RequestFailedError."""
        with self._lock:
            self._find_running()

    def close(self) -> None:
        """End it, also under a job of another thread. Idempotent; a later job starts another one."""
        self._end_running()

    @property
    def pid(self) -> int | None:
        """The one that was started last; None before."""
        return None if self._running is None else self._running.child.pid

    def run(self, jobs: Sequence[RenderJob]) -> list[Answer]:
        """The answers to jobs in their order. Raises PromptError for the first that takes too much."""
        answers: list[Answer] = []
        num_tries = 0  # of the first job without an answer
        with self._lock:
            while len(answers) < len(jobs):
                num_done = len(answers)
                frames = self._make_frames(jobs[num_done : num_done + _MAX_AHEAD])
                running = self._find_running()
                try:
                    for body in running.ask(frames, self._max_render_s):
                        answers.append(_decode(body))
                except OSError as error:
                    self._end_running()
                    num_tries = num_tries + 1 if len(answers) == num_done else 1
                    job, timed_out = jobs[len(answers)], isinstance(error, TimeoutError)
                    self._check_exit(job, running.child, timed_out, num_tries)
                except BaseException:  # Ctrl-C: its answer would be taken for the next job's
                    self._end_running()
                    raise
        return answers

    def _make_frames(self, jobs: Sequence[RenderJob]) -> list[bytes]:
        """Of the first jobs, so few bytes that the socket takes all before any is answered, or one."""
        frames: list[bytes] = []
        num_bytes = 0
        for job in jobs:
            try:
                frame = make_frame(encode(job), self._max_render_s)
            except (UnicodeEncodeError, RecursionError, TypeError, OverflowError) as error:
                raise PromptError(job.param, job.messages, f"JSON that can be sent on ({error})") from None
            num_bytes += len(frame)
            if frames and num_bytes > _MAX_AHEAD_BYTES:
                break
            frames.append(frame)
        return frames

    def _find_running(self) -> _Running:
        if self._running is None or self._running.is_closed:
            try:
                self._running = _Running()
            except OSError as error:
                raise RequestFailedError(f"no process can be started to render chats: {error}") from None
            self._end_running = weakref.finalize(self, self._running.close)
        return self._running

    def _check_exit(self, job: RenderJob, child: ChildProcess, timed_out: bool, num_tries: int) -> None:
        """Raise for what the job is to blame for, or, the second time, for anything else."""
        code = child.exit_code
        if timed_out or code == -signal.SIGPROF:
            allowed = f"what the chat template renders in {self._max_render_s:g} s of processor time"
            raise PromptError(job.param, job.messages, allowed)
        if code in MEMORY_EXITS:
            raise PromptError(job.param, job.messages, MEMORY_ALLOWED)
        if num_tries > 1:
            raise RequestFailedError(f"the process that renders chats ended twice: {child.describe_exit()}")


class _Running:
    """One such process and its socket."""

    def __init__(self) -> None:
        """Raises OSError when there are no processes or descriptors, FilesChangedError."""
        self.is_closed = False
        self._owner = os.getpid()
        self._socket, its_end = socket.socketpair()
        self._frames = FrameReader()
        try:
            with its_end:
                fd = its_end.fileno()
                args = b"%d" % fd
                self.child = ChildProcess.start(_MODULE, _ROLE, args, _ENVIRONMENT, pass_fds=(fd,))
        except BaseException:
            self._socket.close()
            raise

    def ask(self, frames: Sequence[bytes], limit_s: float) -> Iterator[bytes]:
        """The answers' bodies. Raises ConnectionError when the process ends, TimeoutError after the limit."""
        self._socket.settimeout(WALL_FACTOR * limit_s + WALL_MARGIN_S)
        self._socket.sendall(b"".join(frames))
        num_waiting = len(frames)
        while data := self._socket.recv(_RECEIVE_BYTES):
            for body, _ in self._frames.feed(data):
                num_waiting -= 1
                yield body
            if not num_waiting:
                return
        if not self.is_closed:
            wait_readable(self.child.pid_fd, _GRACE_S)  # until its exit code is there
        raise ConnectionError

    def close(self) -> None:
        """End it at once; in a fork, whose parent's it is, nothing."""
        self.is_closed = True
        if self._owner == os.getpid():
            self.child.stop(0.0)  # first: who waits at the socket sees its end
            self._socket.close()


class BoundedTemplate:
    """As ChatTemplate, within the bounds of `process`."""

    def __init__(
        self,
        process: RenderProcess,
        source: str,
        special_tokens: Mapping[str, str],
        tool_use: str | None = None,
    ) -> None:
        self._process = process
        self._texts = TemplateTexts(source, dict(special_tokens), tool_use)

    def render(self, messages: Sequence[Mapping[str, Any]], *args: Any, **options: Any) -> str:
        """As ChatTemplate's; PromptError also for what takes more than the process's time or memory."""
        return self.render_each([messages], *args, **options)[0]

    def render_each(
        self,
        conversations: Iterable[Sequence[Mapping[str, Any]]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Tool] = (),
        param: str = "messages",
    ) -> list[str]:
        """As `render`, of many conversations."""
        named = None if variables is None else as_plain(variables)
        options = add_generation_prompt, continue_final_message, named, list(tools), param
        return self._run([RenderJob(self._texts, _as_plain_list(each), *options) for each in conversations])

    def check_syntax(self) -> None:
        """Raise ModelError if it does not compile."""
        self._run([RenderJob(self._texts, None)])

    def _run(self, jobs: Sequence[RenderJob]) -> list[str]:
        answers = zip(jobs, self._process.run(jobs), strict=True)
        return [_find_text(job, answer) for job, answer in answers]


def _find_text(job: RenderJob, answer: Answer) -> str:
    if isinstance(answer, Rendered):
        return answer.text
    value = job.messages if answer.allowed == MEMORY_ALLOWED else answer.value
    raise _ERRORS[answer.kind](answer.field, value, answer.allowed)


def _as_plain_list(messages: Any) -> Any:
    """A copy of JSON's types, whatever sequence it is."""
    is_list = isinstance(messages, Sequence) and not isinstance(messages, (str, bytes))
    return [as_plain(each) for each in cast(Sequence[Any], messages)] if is_list else as_plain(messages)
