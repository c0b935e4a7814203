"""The two files of `quire run-batch`: OpenAI's batch input, and a result file that a run can go on with.

A result's id is made of its line's number and content, so that the result file alone says what is done.
Neither file is ever held in memory; a line of the input costs 9 bytes.
"""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
from array import array
from collections.abc import Generator, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self

import msgspec

from ....ipc.errors import InputError, QuireError

MAX_LINE_BYTES = 8 * 1024 * 1024  # the server's own cap on a body
STDIN = "-"
_STDIN_PATH = "/dev/stdin"
_RESULT_ID = re.compile(r"batch_req_([1-9][0-9]{0,17})_([0-9a-f]{16})")
# How a line of the result file begins. A whole one, with all logprobs, may be longer than should be read.
_RESULT_START = re.compile(rb'\s*\{\s*"id"\s*:\s*"([^"]*)"')
_WRITTEN_START = b'{"id":"batch_req_'
_NO_TEXT = re.compile(rb"\A\x1f\x8b|\x00")  # gzip, or what has bytes that JSON never has
_READ_BYTES = 1024 * 1024
MAX_LINES = 2**25  # 300 MB for what is known of them; OpenAI's batches have 50,000
_MAX_PIPED_SHARE = 0.5  # of what is free on the disk that a pipe's content is copied to


class BatchError(msgspec.Struct, frozen=True):
    """Why a line was not sent to the model."""

    code: str
    message: str


class BatchResponse(msgspec.Struct, frozen=True):
    """What the server would have answered over HTTP."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchResult(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the result file; exactly one of `response` and `error` is set."""

    id: str
    custom_id: str | None
    response: BatchResponse | None = None
    error: BatchError | None = None


class InputLine(NamedTuple):
    """A line as it stands in the input, cut where it is longer than MAX_LINE_BYTES."""

    number: int  # from 1
    text: bytes
    is_cut: bool
    digest: int

    @property
    def result_id(self) -> str:
        """The id of this line's result in every run."""
        return f"batch_req_{self.number}_{self.digest:016x}"


class OutputError(QuireError):
    """The result file can be written no more; what it holds is whole."""


class Progress:
    """Which lines of an input have a result."""

    def __init__(self, digests: array[int]) -> None:
        self._digests = digests  # by line number - 1; 0: an empty line, which gets no result
        self._is_done = bytearray(len(digests))
        self.num_lines = sum(1 for digest in digests if digest)
        self.num_done = 0

    def add(self, result_id: str) -> bool:
        """Take a result into account; False when it is not one of this input."""
        match = _RESULT_ID.fullmatch(result_id)
        if match is None or int(match[1]) > len(self._digests):
            return False
        place = int(match[1]) - 1
        if self._digests[place] != int(match[2], 16):
            return False
        self.num_done += not self._is_done[place]
        self._is_done[place] = True
        return True

    def is_due(self, line: InputLine) -> bool:
        """Whether a line, as it is now, is still to be run."""
        place = line.number - 1
        return place < len(self._digests) and self._digests[place] != 0 and not self._is_done[place]


class ResultFile:
    """The result file, locked by this process. Results are appended whole, each by one write."""

    def __init__(self, path: str, fd: int) -> None:
        self._path = path
        self._fd = fd

    @classmethod
    def open(cls, path: str, overwrite: bool) -> Self:
        """Raises InputError when it cannot be written or another run has it."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
        except OSError as error:
            raise InputError("output", path, f"a file that can be written ({error.strerror})") from None
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise InputError("output", path, "a regular file, which says what is done; no pipe or device")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise InputError("output", path, "a file that no other run is writing") from None
        if overwrite:
            os.ftruncate(fd, 0)
        return cls(path, fd)

    def resume(self, progress: Progress) -> None:
        """Count the results of earlier runs, and drop a last line that was not written whole.

        Raises InputError for a file that holds anything but results of this very input; then it is unchanged.
        """
        size = 0
        with os.fdopen(os.dup(self._fd), "rb") as file:
            file.seek(0)
            number = 0
            while start := file.readline(_READ_BYTES):
                number += 1
                is_ours = _may_be_torn(start) or _RESULT_START.match(start) is not None
                length = _find_line_end(file, start) if is_ours else None
                if not is_ours or (length is not None and not progress.add(_read_result_id(start))):
                    allowed = "a file of results of this input (--overwrite starts anew)"
                    raise InputError("output", f"{self._path}:{number}", allowed)
                size += length or 0
        os.ftruncate(self._fd, size)

    def append(self, result: BatchResult) -> None:
        """Add a line. Raises OutputError when it cannot be written; then none of it is."""
        data = msgspec.json.encode(result) + b"\n"
        num_written = 0
        try:
            while num_written < len(data):
                num_written += os.write(self._fd, data[num_written:])
        except OSError as error:
            os.ftruncate(self._fd, os.fstat(self._fd).st_size - num_written)
            text = f"output={self._path!r}: cannot be written ({error.strerror}); the same command goes on"
            raise OutputError(text) from None

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._fd)


def read_progress(path: str) -> Progress:
    """The input's lines, none of them done. Raises InputError when it cannot be read or has too many."""
    digests = array("Q")
    for line in read_lines(path):
        if line.number == 1 and _NO_TEXT.search(line.text):
            raise InputError("input", path, "JSON lines as UTF-8 text, not packed, and no UTF-16")
        if line.number > MAX_LINES:
            raise InputError("input", path, f"at most {MAX_LINES} lines")
        digests.append(line.digest)
    return Progress(digests)


def read_lines(path: str) -> Iterator[InputLine]:
    """The lines of an input, one at a time. Raises InputError when it cannot be read."""
    try:
        with Path(path).open("rb", buffering=_READ_BYTES) as file:
            yield from _split_lines(file)
    except OSError as error:
        raise InputError("input", path, f"a file that can be read ({error.strerror})") from None


def _split_lines(file: BinaryIO) -> Iterator[InputLine]:
    number = 0
    while start := file.readline(MAX_LINE_BYTES):
        number += 1
        if number == 1:
            start = start.removeprefix(codecs.BOM_UTF8)
        digest = blake2b(start.strip(), digest_size=8)
        is_cut = False
        last = start
        while not last.endswith(b"\n") and (last := file.readline(MAX_LINE_BYTES)):
            is_cut = True
            digest.update(last)
        text = start.strip()
        # 0 stands for an empty line; that a line's own digest is 0 is as likely as that two are equal.
        value = max(1, int.from_bytes(digest.digest(), "big")) if text or is_cut else 0
        yield InputLine(number, text, is_cut, value)


def _find_line_end(file: BinaryIO, start: bytes) -> int | None:
    """Read the rest of a line that begins with `start`: its length, None if it has no newline."""
    length, last = len(start), start
    while not last.endswith(b"\n"):
        last = file.readline(_READ_BYTES)
        if not last:
            return None
        length += len(last)
    return length


def _read_result_id(start: bytes) -> str:
    match = _RESULT_START.match(start)
    return "" if match is None else match[1].decode(errors="replace")


def _may_be_torn(start: bytes) -> bool:
    """Whether a line without an end may be what a run was writing."""
    return start.startswith(_WRITTEN_START) or _WRITTEN_START.startswith(start)


@contextlib.contextmanager
def open_input(path: str) -> Generator[str]:
    """Inside, a path that `read_lines` can read as often as it likes: of a pipe's content, a copy on disk.

    Raises InputError when it cannot be read, is a device without an end, or a pipe that would fill the disk.
    """
    path = _STDIN_PATH if path == STDIN else path
    with contextlib.ExitStack() as stack:
        try:
            readable = path if stat.S_ISREG(os.stat(path).st_mode) else _copy_pipe(path, stack)
        except OSError as error:
            raise InputError("input", path, f"a file that can be read ({error.strerror})") from None
        yield readable


def _copy_pipe(path: str, stack: contextlib.ExitStack) -> str:
    fd = os.dup(0) if path == _STDIN_PATH else os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as pipe:
        mode = os.fstat(fd).st_mode
        if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(fd)):
            raise InputError("input", path, "a regular file, a pipe, or - for standard input")
        folder = tempfile.gettempdir()
        max_bytes = int(shutil.disk_usage(folder).free * _MAX_PIPED_SHARE)
        copy = stack.enter_context(tempfile.TemporaryFile(dir=folder))  # noqa: SIM115
        while data := pipe.read(_READ_BYTES):
            copy.write(data)
            if copy.tell() > max_bytes:
                allowed = f"at most {max_bytes} bytes from a pipe, or a file (it is copied to {folder})"
                raise InputError("input", path, allowed)
        copy.flush()
    return f"/proc/self/fd/{copy.fileno()}"
