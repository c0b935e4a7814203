"""The layer that makes an AccessRecord of each request, from its head to the last byte of its answer."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ....ipc.params.pooling_params import PoolingParams
from ....ipc.params.sampling_params import SamplingParams
from ...outputs import RequestOutput
from ...requests.vectors.outputs import PoolingOutput, PoolingRequestOutput
from ..connections.auth import CALLER_KEY
from ..engines.server_parts import ServerParts
from ..errors import ApiError
from ..stream import REQUEST_ID_HEADER
from .access_log import CURRENT, KEY_LENGTH, AccessLog, AccessRecord

RECORD_KEY = "quire.access_record"  # of scope["state"]


def log_access(app: ASGIApp, log: AccessLog, parts: ServerParts) -> ASGIApp:
    """The app with a line for each request, around all other layers; `parts` tells how many tokens it had."""
    parts.on_output.append(note_output)
    parts.on_pooled.append(note_pooled)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        record = AccessRecord.of(scope)
        CURRENT.set(record)  # a request has a task, and with it a context, of its own
        state = scope.setdefault("state", {})
        state[RECORD_KEY] = record

        def send_and_note(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                for name, value in message.get("headers", ()):
                    if name == REQUEST_ID_HEADER:
                        record.request_id = value.decode("latin-1")
            return send(message)

        try:
            await app(scope, receive, send_and_note)
        finally:
            record.ended = time.monotonic()
            caller = state.get(CALLER_KEY)
            if caller is not None:
                record.key = caller.key_hash[:KEY_LENGTH]
            log.note(record)

    return answer


def note_refusal(
    log: AccessLog, under_way: Scope | None, method: str, path: str, client: str, error: ApiError
) -> None:
    """A connection has refused the request that is `under_way`, or one that the app has not seen."""
    record: AccessRecord | None = under_way["state"].get(RECORD_KEY) if under_way else None
    if record is None:
        record = AccessRecord(method, path, client)
        record.status, record.cause = error.status, error.cause
        log.note(record)
    elif not record.status:
        record.status, record.cause = error.status, error.cause


def note_output(output: RequestOutput, _params: SamplingParams) -> None:
    """Count a finished output's tokens for its request."""
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
        record.prompt_tokens += sum(len(one.prompt_token_ids) for one in outputs)
