"""AsyncRequests: an AsyncLLM's requests in its engine, and their readers. Of one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import selectors
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from ...ipc.errors import EngineDeadError, QuireError, WrongEventLoopError
from ...ipc.params.sampling_params import RequestOutputKind
from ..outputs import RequestOutput
from ..requests.input_processor import EngineInput
from ..requests.output_processor import OutputProcessor
from ..requests.vectors.state import PoolingInput
from ..text.tokenizer import Tokenizer
from .engine_core_client import EngineCoreClient

_owners = weakref.WeakSet[asyncio.AbstractEventLoop]()


def _part_from_parent() -> None:
    """Give the event loops in a fork a selector and a wake-up pipe of their own.

    asyncio does not: a child that ends in a coroutine takes the descriptors out of the selector that it
    shares with its parent, and both wait for ever. uvloop parts by itself, and has no `_selector`.
    """
    for owner in _owners:
        loop: Any = owner
        if not isinstance(getattr(loop, "_selector", None), selectors.BaseSelector):
            continue
        loop._selector = selectors.DefaultSelector()
        loop._close_self_pipe()
        loop._make_self_pipe()


os.register_at_fork(after_in_child=_part_from_parent)


class OwnerLoop:
    """An AsyncLLM's event loop. `take` makes the running one the owner; until then there is none."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = os.getpid()

    @property
    def is_alive(self) -> bool:
        """There is one, and it has not been closed."""
        return self._loop is not None and not self._loop.is_closed()

    def take(self) -> None:
        """Belong to the running loop from now on."""
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        _owners.add(self._loop)

    def check(self) -> None:
        """Raise in a fork and in another event loop than the owner's, or when that has ended."""
        running = _find_running_loop()  # none in a fork, too
        if running is self._loop or self._loop is None:
            return
        if os.getpid() != self._pid:
            raise EngineDeadError(
                f"this process is a fork of the one that this AsyncLLM belongs to (pid {self._pid}); "
                "make one in each process"
            )
        if running is not None or self._loop.is_closed():
            ended = ", which has ended" if self._loop.is_closed() else ""
            raise WrongEventLoopError(
                f"this AsyncLLM belongs to the event loop that it was started in{ended}; "
                "use it there, or shut it down and make another one"
            )

    def do(self, work: Callable[[], None]) -> bool:
        """Do it now where that is safe, which is True; else soon in the loop that runs in another thread."""
        if os.getpid() != self._pid:  # the loop's selector is the parent's, too
            return True
        loop = self._loop
        if loop is not None and loop.is_running() and _find_running_loop() is not loop:
            with contextlib.suppress(RuntimeError):  # closed at this moment
                loop.call_soon_threadsafe(work)
                return False
        work()
        return True


def _find_running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


_SLICE = 128  # outputs processed before other tasks get a turn: about 1 ms


class Collector(Protocol):
    """Between the output task and the reader of one or more requests."""

    def put(self, output: Any) -> None:
        """Never waits. `output`: of the kind that the requests have."""
        ...

    def fail(self, error: Exception) -> None:
        """No output will come any more."""
        ...


class OutputCollector:
    """Between the output task and one reader: holds at most one output, into which later ones are merged."""

    def __init__(self, kind: RequestOutputKind) -> None:
        self._merges = kind == RequestOutputKind.DELTA
        self._output: RequestOutput | None = None
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None  # an asyncio.Event would hold 0.8 kB a request

    def put(self, output: RequestOutput) -> None:
        """Never waits. A cumulative output replaces the one that was not read; a delta is added to it."""
        if self._output is not None and self._merges:
            self._output.add_delta(output)
        else:
            self._output = output
        self._wake()

    def fail(self, error: Exception) -> None:
        """Let the reader raise `error`, after what it has not read yet."""
        self._error = error
        self._wake()

    async def take(self) -> RequestOutput:
        """The next output; raises what `fail` was given. For one reader."""
        while self._output is None:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        output, self._output = self._output, None
        return output

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class AsyncRequests:
    """`add`, then `leave`. One task reads the engine, until it is gone or `stop`."""

    def __init__(
        self,
        client: EngineCoreClient,
        tokenizer: Tokenizer | None,
        loop: OwnerLoop,
        *,
        on_death: Callable[[Exception], None] = lambda _: None,
        on_news: Callable[[], None] = lambda: None,
    ) -> None:
        """on_death: told why no output will come any more. on_news: called after what has come was put into
        collectors.
        """
        self._client = client
        self._outputs = OutputProcessor(tokenizer)
        self._loop = loop
        self._on_death = on_death
        self._on_news = on_news
        self._collectors: set[Collector] = set()
        self._error: Exception | None = None
        self._reader = asyncio.create_task(self._deliver())

    @property
    def ids(self) -> list[str]:
        """Of unfinished requests; from any thread."""
        return self._outputs.request_ids

    @property
    def num_unfinished(self) -> int:
        """Requests that have not had their final output; from any thread."""
        return self._outputs.num_unfinished

    def check(self) -> None:
        """Raise EngineDeadError when no output will come any more."""
        if self._error is not None:
            raise EngineDeadError(str(self._error)) from self._error

    def expect(self, collector: Collector) -> None:
        """It will have requests; from any thread. To be followed by `check`."""
        self._collectors.add(collector)

    def add(self, requests: Sequence[EngineInput | PoolingInput], collector: Collector) -> None:
        """Hand requests to the engine; `collector` may have others.

        Raises InputError when the id of one is that of a live request; then none is here.
        """
        added: list[str] = []
        try:
            for request in requests:
                self._outputs.add_request(request, collector.put)
                added.append(request.request_id)
        except BaseException:
            self._outputs.forget_requests(added)
            raise
        self.expect(collector)
        try:
            sequences = [sequence for request in requests for sequence in request.sequences]
            if isinstance(requests[0], PoolingInput):
                self._client.add_requests_soon(sequences)
            else:
                self._client.add_requests(sequences)
        except BaseException:
            self._leave(added)
            raise

    def leave(
        self, request_ids: Sequence[str], is_finished: bool = False, collector: Collector | None = None
    ) -> None:
        """Nobody reads these requests any more, nor `collector`; unless they are finished they end in the
        engine, too.

        From any thread.
        """
        if collector is not None:
            self._loop.do(functools.partial(self._collectors.discard, collector))
        if not is_finished:
            self._loop.do(functools.partial(self._leave, request_ids))

    def abort(self, request_ids: Iterable[str]) -> None:
        """End the live ones among these: each reader gets a final output with what has come, at once."""
        engine_ids = self._outputs.abort_requests(request_ids)
        if engine_ids:
            self._client.abort_requests(engine_ids)
            self._on_news()

    def fail(self, error: Exception) -> None:
        """Let every reader raise EngineDeadError. The first error counts."""
        if self._error is not None:
            return
        self._error = error
        for collector in list(self._collectors):  # in one go: `expect` may come from another thread
            collector.fail(EngineDeadError(str(error)))

    def stop(self) -> None:
        """Read the engine no longer."""
        self._reader.cancel()

    async def _deliver(self) -> None:
        try:
            while True:
                outputs = await self._client.get_outputs()
                for start in range(0, len(outputs), _SLICE):
                    followup = self._outputs.process_outputs(outputs[start : start + _SLICE])
                    if followup.ids_to_abort:
                        self._client.abort_requests(followup.ids_to_abort)
                    if followup.requests:
                        self._client.add_requests(followup.requests)
                    if start + _SLICE < len(outputs):
                        await asyncio.sleep(0)
                self._on_news()
        except Exception as error:  # whatever it is, no output will come any more, and readers must know
            self._die(error)
        except asyncio.CancelledError:  # by `stop`, or with its loop's other tasks
            self._die(EngineDeadError("the task that reads the engine was cancelled"))
            raise

    def _die(self, error: Exception) -> None:
        self.fail(error)
        self._on_death(error)

    def _leave(self, request_ids: Sequence[str]) -> None:
        engine_ids = self._outputs.forget_requests(request_ids)
        if engine_ids and self._error is None and self._loop.is_alive:
            with contextlib.suppress(QuireError):
                self._client.abort_requests(engine_ids)
