"""RequestBatch: requests that one call of LLM hands to the engine, until their final outputs are here."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from .client.loop_thread import Gate
from .llm_engine import LLMEngine
from .outputs import RequestOutput
from .requests.input_processor import EngineInput
from .requests.vectors.state import PoolingInput

if TYPE_CHECKING:  # loaded with the first vector
    from .requests.vectors.outputs import PoolingOutput, PoolingRequestOutput

Output = TypeVar("Output", RequestOutput, "PoolingRequestOutput[PoolingOutput]")


class RequestBatch(Generic[Output]):
    """`add`, then `wait`; `forget` after an exception. Outputs come in the thread of the engine's loop."""

    def __init__(self, engine: LLMEngine, requests: Sequence[EngineInput | PoolingInput]) -> None:
        """`requests` are asked for their final outputs only."""
        self._engine = engine
        self.ids = [request.request_id for request in requests]
        self._arrived: deque[Output] = deque()
        self._unsent = deque(requests)
        self._num_missing = len(requests)
        self._shows_progress = False
        self._error: Exception | None = None
        self._gate = Gate()

    def add(self) -> None:
        """Begin to hand the requests to the engine; `wait` raises what is wrong with that."""
        if self._unsent:
            self._engine.add_soon(self._unsent, self)

    def put(self, output: Output) -> None:
        """The final output of one."""
        self._arrived.append(output)
        self._num_missing -= 1
        if self._num_missing == 0:
            self._engine.leave(self)
        if self._shows_progress or self._num_missing == 0:
            self._gate.open()

    def fail(self, error: Exception) -> None:
        """No output will come any more."""
        self._error = error
        self._gate.open()

    def wait(self, progress: Any = None) -> list[Output]:
        """The final outputs in the order of the requests. `progress` is updated by one for each."""
        finished: dict[str, Output] = {}
        self._shows_progress = progress is not None
        while True:
            while self._arrived:
                output = self._arrived.popleft()
                finished[output.request_id] = output
                if progress is not None:
                    progress.update(1)
            if len(finished) == len(self.ids):
                break
            if self._error is not None:
                raise self._error
            self._gate.wait()
        return [finished[request_id] for request_id in self.ids]

    def forget(self) -> None:
        """End what runs of it. Never raises for an engine that has died."""
        self._unsent.clear()
        self._engine.forget_requests(self.ids, self)


def run_batches(batches: Sequence[RequestBatch[Output]], use_tqdm: bool | Callable[..., Any]) -> list[Output]:
    """Add those that are not added yet and wait for all; on any exception none of them runs on."""
    progress = None
    try:
        progress = _make_progress(use_tqdm, sum(len(batch.ids) for batch in batches))
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
