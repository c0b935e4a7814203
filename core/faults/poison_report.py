"""PoisonReport: what is logged about a request that was found to make steps, workers or cores fail.

Ids and numbers only: no text of a prompt, no token, nothing that an exception says beyond its class.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ...ipc.messages import ErrorCode
from ..scheduling.request import Request

FoundBy = Literal["step", "worker death", "core death"]


class PoisonReport(msgspec.Struct, frozen=True, kw_only=True):
    """One convicted request."""

    request_id: str
    client: str  # identity in hex
    code: str  # of the error that it ended with
    found_by: FoundBy
    cause: str  # class of the exception, or how the process ended
    step_id: int | None
    num_prompt_tokens: int
    num_output_tokens: int
    max_total_tokens: int
    num_preemptions: int
    num_attempts: int  # engine cores that were lost with it


def make_poison_report(
    request: Request, code: ErrorCode, found_by: FoundBy, error: str, step_id: int | None
) -> PoisonReport:
    """The report on a request that is about to end with `error`."""
    return PoisonReport(
        request_id=request.request_id,
        client=request.client.hex(),
        code=str(code),
        found_by=found_by,
        cause=error.partition(":")[0],
        step_id=step_id,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=request.num_output_tokens,
        max_total_tokens=request.max_total_tokens,
        num_preemptions=request.num_preemptions,
        num_attempts=request.num_attempts,
    )
