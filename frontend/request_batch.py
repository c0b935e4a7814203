"""RequestBatch: requests that one call of LLM hands to the engine, until their final outputs are here."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from .input_processor import EngineInput
from .llm_engine import LLMEngine
from .outputs import RequestOutput


class RequestBatch:
    """`add`, then `wait`; `forget` after an exception. Outputs come in whichever thread gets them."""

    def __init__(self, engine: LLMEngine, requests: Sequence[EngineInput]) -> None:
        """`requests` are asked for their final outputs only."""
        self._engine = engine
        self.ids = [request.request_id for request in requests]
        self._arrived: deque[RequestOutput] = deque()
        self._requests = requests

    def add(self) -> None:
        """Hand the requests to the engine; nothing the second time."""
        requests, self._requests = self._requests, ()
        self._engine.add_inputs(requests, self._arrived.append)

    def wait(self, progress: Any = None) -> list[RequestOutput]:
        """The final outputs in the order of the requests. `progress` is updated by one for each."""
        finished: dict[str, RequestOutput] = {}
        while len(finished) < len(self.ids):
            self._engine.wait_for(lambda: bool(self._arrived))
            while self._arrived:
                output = self._arrived.popleft()
                finished[output.request_id] = output
                if progress is not None:
                    progress.update(1)
        return [finished[request_id] for request_id in self.ids]

    def forget(self) -> None:
        """End what runs of it. Never raises for an engine that has died."""
        self._engine.forget_requests(self.ids)
