"""The access log: a line a request, of what is noted while it is answered (neither its text nor its tokens).

A request costs a put into a queue; a thread formats and writes.

A reader of standard error that does not read costs lines, which are counted, and nothing else.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections.abc import Collection, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from ....ipc.processes.log_lines import LogFormat, format_time
from ..options import ServerOptions

if TYPE_CHECKING:
    from ....ipc.params.pooling_params import PoolingParams
    from ....ipc.params.sampling_params import SamplingParams
    from ...outputs import RequestOutput
    from ...requests.vectors.outputs import PoolingOutput, PoolingRequestOutput

PROCESS = "quire serve"
_MAX_WAITING = 10_000  # lines that have not been written
_MAX_WRITE_BYTES = 4096  # what a pipe takes as one piece, so that several processes' lines stay whole
_CLOSE_S = 1.0
_GATHER_S = 0.02  # between two writes: waking the thread for each request costs more than writing its line
_CLIENT_GONE = 499  # nginx's code of a request whose client left before it was answered
_LEVELS = {"DEBUG": 0, "INFO": 0, "WARNING": 400, "ERROR": 500}  # the least status that is logged
KEY_LENGTH = 8  # of what an API key hashes to
_MAX_PATH_LENGTH = 200  # a caller without a key is logged as well


@dataclass(slots=True)
class AccessRecord:
    """One request's. `status`: 0 until it is answered. The times are of time.time and time.monotonic."""

    method: str
    path: str
    client: str
    key: str = ""  # the beginning of what its API key hashes to
    status: int = 0
    cause: str = ""  # why it was refused, or failed
    request_id: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    at: float = field(default_factory=time.time)
    began: float = field(default_factory=time.monotonic)
    ended: float = 0.0

    def __post_init__(self) -> None:
        self.path = self.path[:_MAX_PATH_LENGTH]

    def refuse(self, status: int, cause: str) -> None:
        """Why it is not answered, unless it has been."""
        if not self.status:
            self.status, self.cause = status, cause


# Of the request that a task answers; None where nobody wants to know.
CURRENT: ContextVar[AccessRecord | None] = ContextVar("access_record", default=None)


def note_request_id(request_id: str) -> None:
    """What the request of this task is called."""
    record = CURRENT.get()
    if record is not None:
        record.request_id = request_id


def note_cause(status: int, cause: str) -> None:
    """Why the request of this task was refused, or failed."""
    record = CURRENT.get()
    if record is not None:
        record.cause = f"{cause} ({status})" if record.status and record.status != status else cause


def note_output(output: RequestOutput, _params: SamplingParams) -> None:
    """Count a finished output's tokens for the request of this task."""
    record = CURRENT.get()
    if record is not None:
        record.prompt_tokens += len(output.prompt_token_ids)
        if output.metrics is not None:
            record.completion_tokens += output.metrics.num_generation_tokens


def note_pooled(
    _request_id: str, _params: PoolingParams, outputs: Sequence[PoolingRequestOutput[PoolingOutput]]
) -> None:
    """Count the tokens of a request for vectors."""
    record = CURRENT.get()
    if record is not None:
        record.prompt_tokens += sum(len(output.prompt_token_ids) for output in outputs)


class AccessLog:
    """Takes records of requests that have ended. `start` first; `close` writes what is left."""

    def __init__(
        self,
        log_format: LogFormat = "text",
        log_level: str = "INFO",
        unlogged_paths: Collection[str] = (),
        fd: int = 2,
    ) -> None:
        """unlogged_paths: whose successes are left out."""
        self._encode = _encode_text if log_format == "text" else _encode_json
        self._least_status = _LEVELS[log_level]
        self._unlogged_paths = frozenset(unlogged_paths)
        self._fd = fd
        self._waiting: queue.SimpleQueue[AccessRecord | None] = queue.SimpleQueue()
        self._num_left_out = 0
        self._thread = threading.Thread(target=self._write_all, name="access-log", daemon=True)

    def start(self) -> None:
        """Begin to write, in a thread of its own."""
        self._thread.start()

    def note(self, record: AccessRecord) -> None:
        """A request has ended."""
        record.ended = time.monotonic()
        status = record.status = record.status or _CLIENT_GONE
        if status < self._least_status or (status < 400 and record.path in self._unlogged_paths):
            return
        if self._waiting.qsize() >= _MAX_WAITING:
            self._num_left_out += 1
            return
        self._waiting.put(record)

    def close(self) -> None:
        """Write what waits, for a bounded time."""
        self._waiting.put(None)
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)

    def _write_all(self) -> None:
        is_open = True
        while is_open:
            records = [self._waiting.get()]
            while not self._waiting.empty() and len(records) < _MAX_WAITING:
                records.append(self._waiting.get())
            is_open = None not in records
            lines = [self._encode(record) for record in records if record is not None]
            if self._num_left_out:
                lines.append(self._encode_left_out())
            try:
                for piece in _join(lines):
                    os.write(self._fd, piece)
            except OSError:  # nobody reads any more, or the disk is full; a server goes on
                self._num_left_out += len(lines)
            if is_open:
                time.sleep(_GATHER_S)

    def _encode_left_out(self) -> bytes:
        number, self._num_left_out = self._num_left_out, 0
        record = AccessRecord("-", "-", "")
        record.refuse(500, f"{number} lines of the access log were left out")
        record.ended = record.began
        return self._encode(record)


def make_access_log(options: ServerOptions) -> AccessLog | None:
    """None for a server without one. It is to tell `note_output` and `note_pooled` of what it answers."""
    if not options.has_access_log:
        return None
    return AccessLog(options.log_format, options.log_level, options.unlogged_paths)


def _join(lines: Sequence[bytes]) -> list[bytes]:
    """Lines in pieces that a pipe takes as one."""
    pieces: list[bytes] = [b""]
    for line in lines:
        if len(pieces[-1]) + len(line) > _MAX_WRITE_BYTES:
            pieces.append(b"")
        pieces[-1] += line
    return pieces


def _encode_json(record: AccessRecord) -> bytes:
    level = "INFO" if record.status < 400 else "WARNING" if record.status < 500 else "ERROR"
    line = {"time": format_time(record.at), "level": level, "process": PROCESS, "message": "request"}
    noted = {
        "method": record.method,
        "path": _clean(record.path),
        "status": record.status,
        "ms": _measure_ms(record),
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "id": _clean(record.request_id),
        "client": _clean(record.client),
        "key": record.key,
        "cause": _clean(record.cause),
    }
    return msgspec.json.encode(line | {name: value for name, value in noted.items() if value}) + b"\n"


def _encode_text(record: AccessRecord) -> bytes:
    words = [
        f"{PROCESS}: {format_time(record.at)} {record.method} {_quote(record.path)} {record.status}",
        f"{_measure_ms(record)} ms",
    ]
    if record.prompt_tokens:
        words.append(f"in={record.prompt_tokens} out={record.completion_tokens}")
    for name in ("request_id", "client", "key"):
        if value := getattr(record, name):
            words.append(f"{name.removeprefix('request_')}={_quote(value)}")
    if record.cause:
        words.append(f"cause={_quote(record.cause)}")
    return f"{' '.join(words)}\n".encode()


def _measure_ms(record: AccessRecord) -> float:
    return round((record.ended - record.began) * 1000, 1)


def _quote(text: str) -> str:
    """What a caller has written, on one line and as one word."""
    if text.isascii() and text.isprintable() and " " not in text and '"' not in text:
        return text
    return json.dumps(text).replace("\x7f", "\\u007f")


def _clean(text: str) -> str:
    """Without what UTF-8 cannot hold."""
    return text if text.isascii() else text.encode(errors="replace").decode()
