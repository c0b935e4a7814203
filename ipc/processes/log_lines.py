"""How a process of Quire logs: lines on standard error, as text that begins with its name, or as JSON."""

from __future__ import annotations

import logging
import time
from typing import Literal

import msgspec

from ..errors import make_printable

LogFormat = Literal["text", "json"]


class LogLine(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A line as JSON. time: UTC."""

    time: str
    level: str
    process: str
    message: str
    exception: str = ""


class JsonLines(logging.Formatter):
    """Records as LogLines of one process."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line = LogLine(
            time=format_time(record.created),
            level=record.levelname,
            process=self._process,
            message=record.getMessage(),
            exception=self.formatException(record.exc_info) if record.exc_info else "",
        )
        return msgspec.json.encode(line).decode()


class TextLines(logging.Formatter):
    """Records as text. What could steer the terminal that shows them, of a file's or a model's name, is ?."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return text if text.isprintable() else "\n".join(map(make_printable, text.split("\n")))


def start_logging(process: str, level: str, log_format: str, others_level: str | None = None) -> None:
    """Log from `level` on as `process`. `others_level`: of what is not Quire's; None: the same."""
    handler = logging.StreamHandler()
    text = TextLines(f"{process}: %(message)s")
    handler.setFormatter(JsonLines(process) if log_format == "json" else text)
    logging.basicConfig(level=others_level or level, handlers=[handler])
    logging.getLogger("quire").setLevel(level)


def format_time(at: float) -> str:
    """Seconds since the epoch as '2026-11-23T08:15:30.123Z'."""
    whole = int(at)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(whole))}.{int((at - whole) * 1000):03}Z"
