"""PoolingInput and PoolingState: a request for a vector on its way to the engine, and what comes back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from ....ipc.protocol.messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from ...outputs import RequestMetrics

if TYPE_CHECKING:  # loaded with the first vector
    from .outputs import PoolingOutput, PoolingRequestOutput

    Pooled = PoolingRequestOutput[PoolingOutput]
    PoolingSink = Callable[[Pooled], None]


class PoolingInput(msgspec.Struct, frozen=True):
    """A request, ready to be sent: one EngineCoreRequest, in a list as those of an EngineInput are."""

    request_id: str
    prompt_token_ids: list[int]
    sequences: list[EngineCoreRequest]

    @property
    def engine_id(self) -> str:
        """The engine's id of it."""
        return self.sequences[0].request_id


class PoolingState:
    """Takes the engine's answers to one request until it is complete."""

    __slots__ = ("_num_cached_tokens", "_parts", "request", "sink")

    def __init__(self, request: PoolingInput, sink: PoolingSink) -> None:
        self.request = request
        self.sink = sink
        self._parts: list[bytes] = []
        self._num_cached_tokens = 0

    def make_abort(self, engine_id: str) -> EngineCoreOutput:
        """What ends it without its result."""
        return EngineCoreOutput(engine_id, 0, [], FinishReason.ABORT)

    def take(self, output: EngineCoreOutput) -> Pooled | None:
        """The result with the last of the answers, None before."""
        if output.num_cached_tokens is not None:
            self._num_cached_tokens = output.num_cached_tokens
        if output.pooled is not None:
            self._parts.append(output.pooled)
        if output.finish_reason is None:
            return None
        return self._make_output(output, output.finish_reason)

    def _make_output(self, output: EngineCoreOutput, reason: FinishReason) -> Pooled:
        from .outputs import PoolingOutput, PoolingRequestOutput

        request, sent = self.request, self.request.sequences[0]
        params = sent.pooling_params
        num_rows = len(request.prompt_token_ids) if params is not None and params.is_token_wise else None
        is_whole = reason is FinishReason.STOP
        error = output.error
        if not is_whole and error is None:
            error = "it was aborted, or its time was over, before it was computed"
        metrics = RequestMetrics(arrival_time=sent.arrival_time)
        if output.times is not None:
            metrics.take_times(output.times)
        return PoolingRequestOutput(
            request.request_id,
            PoolingOutput(b"".join(self._parts) if is_whole else b"", num_rows),
            request.prompt_token_ids,
            self._num_cached_tokens,
            True,
            str(reason),
            error,
            None if output.error_code is None else str(output.error_code),
            metrics,
        )
