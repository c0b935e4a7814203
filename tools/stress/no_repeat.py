"""NoRepeat: the logits processor of a stress run's own engine: no token comes twice in a row."""

from __future__ import annotations

from typing import Self

from torch import Tensor

from ...worker.sampling.logits_processor import LogitsProcessor, LogitsRequest


class NoRepeat(LogitsProcessor):
    """For requests with the extra argument `no_repeat`."""

    def __init__(self, last_token: int) -> None:
        self._last_token = last_token

    @classmethod
    def for_request(cls, request: LogitsRequest) -> Self | None:
        tokens = request.prompt_token_ids + request.output_token_ids
        return cls(tokens[-1]) if request.extra_args.get("no_repeat") else None

    def append(self, token_id: int) -> None:
        self._last_token = token_id

    def apply(self, logits: Tensor) -> None:
        logits[self._last_token] = float("-inf")
