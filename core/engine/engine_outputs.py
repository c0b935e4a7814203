"""EngineOutputs: appends a step's tokens to their requests, and files outputs of them by client.

It knows requests, their times and what is observed of them; not what runs when, or why a request fails.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...ipc.protocol.messages import EngineCoreOutput, FinishReason, drop_positions
from ...ipc.protocol.step import RowLogprobs, RowPooled
from ..scheduling.request import Request
from ..scheduling.scheduler import Scheduler
from ..scheduling.step import Step
from ..stats.stats import EngineCounters, Observations


class EngineOutputs:
    """The outputs of each client, in order, until `take`."""

    def __init__(self, counters: EngineCounters, observations: Observations, scheduler: Scheduler) -> None:
        self._counters = counters
        self._observations = observations
        self._scheduler = scheduler
        self._outputs: dict[bytes, list[EngineCoreOutput]] = {}
        self._accepted_at = -1.0  # when the tokens of the step before were accepted
        self._num_first_tokens = 0  # in the step whose tokens are being accepted

    def add(self, client: bytes, output: EngineCoreOutput) -> None:
        """File an output."""
        self._outputs.setdefault(client, []).append(output)

    def take(self) -> dict[bytes, list[EngineCoreOutput]]:
        """The outputs since the last call."""
        outputs, self._outputs = self._outputs, {}
        return outputs

    def forget_client(self, client: bytes) -> None:
        """Drop the outputs of a client that is gone."""
        self._outputs.pop(client, None)

    def accept_tokens(
        self, step: Step, token_ids: list[int], logprobs: Mapping[int, RowLogprobs], now: float
    ) -> list[Request]:
        """Append each sampled token to its request and file it. Returns the requests that have ended."""
        finished: list[Request] = []
        outputs = self._outputs
        num_accepted = 0
        num_apart = self._observe_odd_gaps(step, now)
        self._num_first_tokens = 0
        for i, (request, token_id) in enumerate(zip(step.sampled, token_ids, strict=True)):
            if request.finish_reason is not None:
                continue  # it ended while this step ran
            num_accepted += 1
            start = len(request.output_token_ids)
            request.output_token_ids.append(token_id)  # replaces the oldest placeholder
            request.num_placeholders -= 1
            num_tokens = request.num_tokens = request.num_tokens + 1
            if num_tokens >= request.next_index_at:
                self._scheduler.index_full_blocks(request)
            if request.repetition is not None:
                request.repetition.append(request.output_token_ids)
            if (
                token_id in request.stop_token_ids
                or num_tokens >= request.max_total_tokens
                or request.repetition is not None
            ):
                request.finish_reason = request.find_finish()
                if request.finish_reason is not None:
                    finished.append(request)
            request.last_token_time = now
            if request.first_token_time is not None and request.finish_reason is None and not logprobs:
                output = EngineCoreOutput(request.request_id, start, [token_id])
            else:
                output = self._make_full_output(request, start, logprobs.get(step.sampled_rows[i]), now)
            try:
                outputs[request.client].append(output)
            except KeyError:
                outputs[request.client] = [output]
        self._counters.generation_tokens += num_accepted
        num_apart += self._num_first_tokens
        self._observations.observe_gap(now - self._accepted_at, num_accepted - num_apart)
        self._accepted_at = now
        return finished

    def accept_pooled(self, step: Step, pooled: list[RowPooled], now: float) -> list[Request]:
        """File what was pooled of a step's rows, but for positions that were delivered before a preemption.

        Returns the requests that have ended.
        """
        places = {row: place for place, row in enumerate(step.rows)}
        complete = set(step.pooled_rows)
        finished: list[Request] = []
        for entry in pooled:
            place = places[entry.row]
            request, data, pooled_start = step.requests[place], entry.data, 0
            if request.finish_reason is not None:
                continue  # it ended while this step ran
            if request.is_token_wise:
                first, num_tokens = step.prompt_starts[entry.row], step.num_tokens[place]
                data, pooled_start = _drop_delivered(request, data, first, num_tokens)
            if entry.row in complete:
                request.finish_reason = FinishReason.STOP
                request.first_token_time = request.last_token_time = now
                finished.append(request)
            elif not data:
                continue
            self.add(
                request.client,
                EngineCoreOutput(
                    request.request_id,
                    0,
                    [],
                    request.finish_reason,
                    num_cached_tokens=request.num_cached_tokens,
                    times=request.to_times(),
                    pooled=data,
                    pooled_start=pooled_start,
                ),
            )
        return finished

    def accept_prompt_logprobs(self, step: Step, logprobs: Mapping[int, RowLogprobs]) -> None:
        """File a step's prompt logprobs, but for positions that were delivered before a preemption."""
        for row, request in zip(step.rows, step.requests, strict=True):
            entry = logprobs.get(row)
            if entry is None or entry.prompt is None or request.finish_reason is not None:
                continue
            num_known = request.num_prompt_logprobs - step.prompt_starts[row]
            block = drop_positions(entry.prompt, num_known)
            if block.num_positions:
                request.num_prompt_logprobs += block.num_positions
                start = request.num_output_tokens
                self.add(
                    request.client, EngineCoreOutput(request.request_id, start, [], prompt_logprobs=block)
                )

    def _observe_odd_gaps(self, step: Step, now: float) -> int:
        """Observe the gap of each request that had no token in the step before. Returns how many they are.

        They come last in a step, since decodes come first. All others share one gap, observed at once.
        """
        num_apart = 0
        for request in reversed(step.sampled):
            if request.last_token_time == self._accepted_at:
                break
            if request.first_token_time is not None and request.finish_reason is None:
                self._observations.observe_gap(now - request.last_token_time)
                num_apart += 1
        return num_apart

    def _make_full_output(
        self, request: Request, start: int, logprobs: RowLogprobs | None, now: float
    ) -> EngineCoreOutput:
        """The output of a token that is the first or the last, or has logprobs."""
        is_first = request.first_token_time is None
        if is_first:
            request.first_token_time = now
            self._num_first_tokens += 1
            if start == 0:
                self._observations.observe_first_token(request, now)
        return EngineCoreOutput(
            request_id=request.request_id,
            start=start,
            new_token_ids=[request.output_token_ids[-1]],
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            logprobs=logprobs.sample if logprobs is not None else None,
            num_cached_tokens=request.num_cached_tokens if is_first else None,
            times=request.to_times() if request.finish_reason is not None else None,
        )


def _drop_delivered(request: Request, data: bytes, start: int, num_tokens: int) -> tuple[bytes, int]:
    """The vectors of the tokens [start, start + num_tokens) that were not delivered yet, and the byte of the
    whole answer at which they begin.
    """
    num_known, size_bytes = max(0, request.num_pooled_tokens - start), len(data) // num_tokens
    request.num_pooled_tokens = max(request.num_pooled_tokens, start + num_tokens)
    return data[num_known * size_bytes :], (start + num_known) * size_bytes
