"""TextService: which lane does a job, and what its caller is told when it cannot be done."""

from __future__ import annotations

import functools
from http import HTTPStatus

from ....ipc.files.file_identity import Stamps
from ..errors import ApiError, overloaded, unavailable
from . import jobs
from .lane import (
    EndedBy,
    JobEndedError,
    LaneLimits,
    TextLane,
    TextProcess,
    TextUnavailableError,
    TurnQueueFullError,
)
from .work import MEMORY_ALLOWED, name_of

SHORT_JOB_BYTES = 20_000  # rendered and tokenized within milliseconds
_SHORT_JOB_MESSAGES = 64  # likewise
_SHORT_JOB_S = 0.5  # of processor time; what takes longer is tried once more where it disturbs nobody
_LONG_LANE_IDLE_S = 5.0  # then its process, and with it what memory it has taken, is given up


class TextService:
    """Renders, tokenizes and compiles grammars for one server, in processes that can be ended. For one
    event loop.

    Three lanes, each with a process of its own: short jobs, and at a low priority long ones and grammars.
    These two are started for their first job; that of grammars stays, with the trie that it has loaded.
    `tokenizer`: the model's folder. max_render_s: processor time of a long job, or a grammar.
    `chat_template`: in place of the folder's. `noted`: the tokenizer's files as its engine was started with.
    """

    def __init__(
        self,
        tokenizer: str,
        max_render_s: float,
        chat_template: str | None = None,
        noted: Stamps | None = None,
    ) -> None:
        self._max_render_s = max_render_s
        make = functools.partial(TextProcess, tokenizer, chat_template, noted)

        def open_lane(is_background: bool, max_s: float, max_sent: int, idle_s: float | None) -> TextLane:
            limits = LaneLimits(limit_s=max_s, max_sent=max_sent, idle_s=idle_s)
            return TextLane(limits, functools.partial(make, is_background))

        self._short = open_lane(False, min(_SHORT_JOB_S, max_render_s), 4, None)
        self._long = open_lane(True, max_render_s, 1, _LONG_LANE_IDLE_S)
        self._grammars = open_lane(True, max_render_s, 1, None)
        self._lanes = self._short, self._long, self._grammars

    def start(self) -> None:
        """Start the process of short jobs, so that the first one does not wait for it."""
        self._short.start()

    def close(self) -> None:
        """End the processes; jobs that wait are answered with 503. Idempotent."""
        for lane in self._lanes:
            lane.close()

    @property
    def pids(self) -> list[int]:
        """The processes that run now: of short jobs, of long ones, of grammars."""
        return [lane.pid for lane in self._lanes if lane.pid is not None]

    async def run(self, job: jobs.TextJob, tenant: str) -> jobs.TokenIds | jobs.Body | jobs.Text:
        """The answer to a job, which counts as `tenant`'s.

        Raises ApiError: 400 for what the request itself is to blame for, also for too much time or memory,
        429 when the tenant has too much waiting, 503 when there is no process.
        """
        name = name_of(job)
        try:
            body = jobs.encode_body(job)
        except (UnicodeEncodeError, RecursionError, TypeError, OverflowError) as error:
            raise ApiError(
                HTTPStatus.BAD_REQUEST, f"{name}: JSON that can be sent on ({error})", param=name
            ) from None
        try:
            answer = await self._try(job, body, tenant)
        except JobEndedError as error:
            done = "compiled" if isinstance(job, jobs.GrammarJob) else "rendered and tokenized"
            raise self._blame(name, len(body), done, error) from None
        except TurnQueueFullError as error:
            raise overloaded(f"{name}={len(body)} bytes: of this client's texts {error}") from None
        except TextUnavailableError as error:
            raise unavailable(str(error), "no_text_process") from None
        if isinstance(answer, jobs.Refused):
            raise ApiError(HTTPStatus.BAD_REQUEST, answer.message, param=answer.field, code=answer.code)
        assert not isinstance(answer, jobs.Ready), "only the first frame says so"
        return answer

    async def _try(self, job: jobs.TextJob, body: bytes, tenant: str) -> jobs.TextAnswer:
        is_grammar = isinstance(job, jobs.GrammarJob)
        if not is_grammar and len(body) <= SHORT_JOB_BYTES and _count_messages(job) <= _SHORT_JOB_MESSAGES:
            try:
                return await self._short.run(body, tenant)
            except JobEndedError:
                pass
        lane = self._grammars if is_grammar else self._long
        try:
            return await lane.run(body, tenant)
        except JobEndedError as error:
            if error.by != EndedBy.LOSS:
                raise
        return await lane.run(body, tenant)

    def _blame(self, name: str, size_bytes: int, done: str, error: JobEndedError) -> ApiError:
        allowed = {
            EndedBy.TIME: f"what is {done} in {self._max_render_s:g} s (max_render_s)",
            EndedBy.MEMORY: MEMORY_ALLOWED,
            EndedBy.LOSS: f"what can be {done}; twice the process that did ended: {error}",
        }[error.by]
        return ApiError(HTTPStatus.BAD_REQUEST, f"{name}={size_bytes} bytes: {allowed}", param=name)


def _count_messages(job: jobs.TextJob) -> int:
    if isinstance(job, jobs.TokenizeJob):
        return _count_messages(job.source)
    return len(job.messages) + len(job.tools) if isinstance(job, jobs.Conversation) else 0
