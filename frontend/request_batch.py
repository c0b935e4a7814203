"""RequestBatch: requests that one call of LLM hands to the engine, until their final outputs are here."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from .llm_engine import LLMEngine
from .outputs import RequestOutput
from .requests.input_processor import EngineInput
from .requests.vectors.outputs import PoolingOutput, PoolingRequestOutput
from .requests.vectors.state import PoolingInput

Output = TypeVar("Output", RequestOutput, PoolingRequestOutput[PoolingOutput])


class RequestBatch(Generic[Output]):
    """`add`, then `wait`; `forget` after an exception. Outputs come in whichever thread gets them."""

    def __init__(self, engine: LLMEngine, requests: Sequence[EngineInput | PoolingInput]) -> None:
        """`requests` are asked for their final outputs only."""
        self._engine = engine
        self.ids = [request.request_id for request in requests]
        self._arrived: deque[Output] = deque()
        self._requests = requests

    def add(self) -> None:
        """Hand the requests to the engine; nothing the second time."""
        requests, self._requests = self._requests, ()
        self._engine.add_inputs(requests, self._arrived.append)

    def wait(self, progress: Any = None) -> list[Output]:
        """The final outputs in the order of the requests. `progress` is updated by one for each."""
        finished: dict[str, Output] = {}
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


def run_batches(batches: Sequence[RequestBatch[Output]], use_tqdm: bool | Callable[..., Any]) -> list[Output]:
    """Add those that are not added yet and wait for all; on any exception none of them runs on."""
    progress = _make_progress(use_tqdm, sum(len(batch.ids) for batch in batches))
    try:
        for batch in batches:
            batch.add()
        return [output for batch in batches for output in batch.wait(progress)]
    except BaseException:  # Ctrl-C too
        for batch in batches:
            batch.forget()
        raise
    finally:
        if progress is not None:
            progress.close()


def _make_progress(use_tqdm: bool | Callable[..., Any], total: int) -> Any:
    if not use_tqdm or not total:
        return None
    if not callable(use_tqdm):
        from tqdm.auto import tqdm as use_tqdm
    return use_tqdm(total=total, desc="Processed prompts", dynamic_ncols=True)
