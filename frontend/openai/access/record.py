"""AccessRecord: what is noted of one request while it is answered. Its text and its tokens are not."""

from __future__ import annotations

import time
from contextvars import ContextVar

from starlette.types import Scope

KEY_LENGTH = 8  # of what an API key hashes to
_MAX_PATH_LENGTH = 200  # a caller without a key is logged as well


class AccessRecord:
    """One request's. `status`: 0 until it is answered. The times are of time.time and time.monotonic."""

    __slots__ = (
        "at",
        "began",
        "cause",
        "client",
        "completion_tokens",
        "ended",
        "key",
        "method",
        "path",
        "prompt_tokens",
        "request_id",
        "status",
    )

    def __init__(self, method: str, path: str, client: str) -> None:
        self.method = method
        self.path = path[:_MAX_PATH_LENGTH]
        self.client = client
        self.key = ""  # the beginning of what its API key hashes to
        self.status = 0
        self.cause = ""  # why it was refused, or failed
        self.request_id = ""
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.at = time.time()
        self.began = self.ended = time.monotonic()

    @classmethod
    def of(cls, scope: Scope) -> AccessRecord:
        """A request's that has just come."""
        client = scope.get("client")
        return cls(scope["method"], scope["path"], client[0] if client else "")


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
