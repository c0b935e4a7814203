"""LLMEngine: the synchronous engine, one step at a time. Its client and processors are in a thread's loop."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar, Unpack

from ..ipc.errors import EngineDeadError, InputError, QuireError
from ..ipc.params.absent_arguments import check_absent
from ..ipc.params.request_options import RequestKeywords, read_options
from ..ipc.params.sampling_params import RequestOutputKind, SamplingParams
from ..ipc.protocol.messages import EngineFacts
from .client.async_requests import AsyncRequests, Collector, OwnerLoop
from .client.loop_thread import CLOSED, Gate, LoopThread
from .client.utility_calls import UtilityCalls
from .options.engine_args import EngineArgs
from .outputs import RequestOutput
from .requests.input_processor import EngineInput, InputProcessor
from .requests.prompts import Prompt
from .requests.vectors.state import PoolingInput
from .text.tokenizer import Tokenizer

if TYPE_CHECKING:  # what reaches engines, with its sockets and processes, is loaded when one is wanted
    from .client.engine_core_client import EngineCoreClient
    from .client.remote_daemon import Attachment

_ADDED_AT_ONCE = 64  # requests: about a millisecond for which other threads wait

P = ParamSpec("P")
T = TypeVar("T")


def _blocking(
    method: Callable[Concatenate[UtilityCalls, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[LLMEngine, P], T]:
    """A call about the engine that waits for its answer."""

    @functools.wraps(method)
    def call(engine: LLMEngine, *args: P.args, **options: P.kwargs) -> T:
        return engine.call_client(lambda client: method(client, *args, **options))

    return call


class LLMEngine:
    """Requests in, outputs out: `add_request`, then `step` until `has_unfinished_requests` is False.

    Every request ends in exactly one RequestOutput with `finished`, also when it is aborted (finish_reason
    'abort') or the engine fails it ('error', with the cause in `RequestOutput.error`).

    Any thread may call anything at any time, and none waits for one that waits. Ctrl-C leaves it usable.
    After `close`, and in a fork of this process, every call raises EngineDeadError but `startup`,
    `forget_requests` and `close` itself.
    """

    def __init__(
        self, loop: LoopThread, client: EngineCoreClient, tokenizer: Tokenizer | None, seed: int | None = None
    ) -> None:
        """`client` lives in `loop`. seed: of requests without one, see SeedSource."""
        self._loop = loop
        self._client = client
        self.tokenizer = tokenizer
        self.input_processor = InputProcessor(client.facts, tokenizer, seed)
        self._steps = _StepOutputs()
        self._requests = loop.call(_start_requests, client, tokenizer, self._steps)
        finish = functools.partial(_close_client, client, self._requests)
        self._finalizer = weakref.finalize(self, loop.close, finish)

    @classmethod
    def from_engine_args(
        cls, engine_args: EngineArgs, on_phase: Callable[[str], None] | None = None, **others: Any
    ) -> Self:
        """Check the arguments, start the engine's processes and wait until they are ready.

        `on_phase` is told each start-up phase as it begins. others: vLLM's that ask for nothing.
        Raises ConfigError, ModelError, EngineStartError.
        """
        from .engine_start import start_engine_here

        check_absent(others, ("on_phase",))
        config = engine_args.create_engine_config()
        with _starting() as loop:
            client, tokenizer = loop.run(lambda: start_engine_here(config, on_phase))
            return cls(loop, client, tokenizer, engine_args.seed)

    @classmethod
    def attach(
        cls,
        daemon: Attachment,
        *,
        client_kind: str = "LLMEngine",
        weight: float = 1.0,
        on_phase: Callable[[str], None] | None = None,
        has_tokenizer: bool = True,
    ) -> Self:
        """Attach to a running daemon, which `close` leaves. Raises DaemonError, ConfigError for a bad name.

        `daemon`: its name, or what `choose_attachment` says of one on another machine. has_tokenizer: False
        if it is only looked at.
        """
        from .client.async_engine_core_client import attach_async_client
        from .engine_start import load_served_tokenizer

        with _starting() as loop:
            client = loop.run(lambda: attach_async_client(daemon, client_kind, weight, on_phase))
            try:
                tokenizer = load_served_tokenizer(client.facts) if has_tokenizer else None
                return cls(loop, client, tokenizer)
            except BaseException:
                loop.call(client.close)
                raise

    @property
    def facts(self) -> EngineFacts:
        """What the engine says of itself; process ids change when a process is replaced."""
        self._check_open()
        return self._client.facts

    @property
    def facts_by_engine(self) -> dict[int, EngineFacts]:
        """What each engine that is there says of itself, by its number."""
        self._check_open()
        return self._client.engines

    @property
    def startup(self) -> list[tuple[str, float]]:
        """(phase, seconds) of the start, in order; the sum is the wall time."""
        return self._client.startup

    def check_usable(self) -> None:
        """Raise EngineDeadError when the engine has ended, and in a fork of its owner's process."""
        self._loop.check_owner()
        self._requests.check()
        self._client.check_usable()

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        arrival_time: float | None = None,
        **options: Unpack[RequestKeywords],
    ) -> None:
        """Check a request and hand it to the engine.

        priority: lower runs first, if the policy asks for it. tenant: whose request it is under the fair
        policy, '' for this client's own. timeout_s: it ends with 'abort' and what it has so many seconds
        after it came to the engine. queue_timeout_s: it ends with 'error' if it has not begun by then.
        Raises PromptError, SamplingParamsError, InputError (a live request has this id), EngineDeadError.
        """
        self.check_usable()
        sampling = SamplingParams() if params is None else params
        made = self.input_processor.process(
            request_id, prompt, sampling, read_options(**options), arrival_time
        )
        self.add_inputs([made])

    def add_inputs(self, requests: Sequence[EngineInput]) -> None:
        """Hand requests to the engine that were made of prompts, for instance by `input_processor`.

        Raises with some of those before the one at fault added.
        """
        self.check_usable()
        for start in range(0, len(requests), _ADDED_AT_ONCE):
            self._loop.call(self._add, requests[start : start + _ADDED_AT_ONCE])

    def add_soon(self, requests: deque[EngineInput | PoolingInput], collector: Collector) -> None:
        """Take requests out of `requests` and hand them to the engine, until there are none.

        Their outputs, or why they cannot be added, come to `collector` in the thread of the event loop.
        """
        self._loop.check_owner()
        self._requests.expect(collector)
        self.check_usable()
        self._loop.post(self._add_some, requests, collector)

    def step(self) -> list[RequestOutput]:
        """Wait for what the engine generates next and return what is to be delivered of it, perhaps nothing.

        Returns at once when no request is unfinished. Of a request whose outputs nobody has taken for a while
        there is one, which has all of it. Raises EngineDeadError.
        """
        self._loop.check_owner()
        return self._steps.take(self.check_usable, self.has_unfinished_requests)

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests; each one's final output comes from `step`. Unknown ids are ignored."""
        self.check_usable()
        self._loop.call(
            self._requests.abort, [request_ids] if isinstance(request_ids, str) else list(request_ids)
        )

    def abort_named(self, names: Sequence[str], tenant: str = "") -> None:
        """End requests of any client by name or by the id that live views show; '': of every tenant."""
        self.check_usable()
        self._loop.call(self._client.abort_named, names, tenant)

    def forget_requests(self, request_ids: Iterable[str], collector: Collector | None = None) -> None:
        """End requests whose outputs nobody will read; `collector`: which has no others.

        Never raises for an engine that has died.
        """
        ids = list(request_ids)
        with contextlib.suppress(QuireError):
            self._loop.call(self._requests.leave, ids, False, collector)
        self._steps.forget(ids)

    def leave(self, collector: Collector) -> None:
        """All that `add_soon` was given for it has ended."""
        self._requests.leave((), True, collector)

    reset_prefix_cache = _blocking(UtilityCalls.reset_prefix_cache)
    stats = _blocking(UtilityCalls.stats)
    stats_by_engine = _blocking(UtilityCalls.stats_by_engine)
    snapshot = _blocking(UtilityCalls.snapshot)
    snapshot_by_engine = _blocking(UtilityCalls.snapshot_by_engine)
    history_by_engine = _blocking(UtilityCalls.history_by_engine)
    metrics = _blocking(UtilityCalls.metrics)
    metrics_by_engine = _blocking(UtilityCalls.metrics_by_engine)
    start_profile = _blocking(UtilityCalls.start_profile)
    stop_profile = _blocking(UtilityCalls.stop_profile)
    check_integrity = _blocking(UtilityCalls.check_integrity)

    def call_client(self, ask: Callable[[EngineCoreClient], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine of the client in its event loop and wait for what it returns or raises."""
        self.check_usable()
        return self._loop.run(lambda: ask(self._client))

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has outputs still to come."""
        self._check_open()
        return bool(self._steps.live) or self._requests.num_unfinished > 0

    def get_num_unfinished_requests(self) -> int:
        """Requests whose last output `step`, or another call that waits for it, has yet to return."""
        self._check_open()
        return len(self._steps.live.keys() | set(self._requests.ids))

    def get_tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None with skip_tokenizer_init."""
        self._check_open()
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What is used when a caller of LLM gives none: generation_config.json's values, if it has any."""
        from .engine_start import read_served_sampling

        return SamplingParams(**read_served_sampling(self.facts))

    def close(self) -> None:
        """End the engine and its processes within 2 s. Idempotent, from any thread; nothing in a fork.

        Calls that wait in other threads raise EngineDeadError.
        """
        self._finalizer()
        if self.tokenizer is not None:
            self.tokenizer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc_info: Any) -> None:
        self.close()

    def _check_open(self) -> None:
        """Raise after `close` and in a fork; what needs no engine is still said of one that has died."""
        self._loop.check_owner()
        if not self._finalizer.alive:
            raise EngineDeadError(CLOSED)

    def _add_some(self, requests: deque[EngineInput | PoolingInput], collector: Collector) -> None:
        """In the loop's thread. Its other work comes between."""
        some: list[EngineInput | PoolingInput] = []
        with contextlib.suppress(IndexError):  # empty, perhaps since now
            while len(some) < _ADDED_AT_ONCE:
                some.append(requests.popleft())
        if some:
            try:
                self._requests.add(some, collector)
            except Exception as error:
                collector.fail(error)
            else:
                self._loop.post(self._add_some, requests, collector)

    def _add(self, requests: Sequence[EngineInput]) -> None:
        """In the loop's thread."""
        for request in requests:
            if request.request_id in self._steps.live:  # also if only `step` has yet to return its end
                raise InputError("request_id", request.request_id, "an id that no unfinished request has")
        self._requests.add(requests, self._steps)
        self._steps.live |= {request.request_id: request.params.output_kind for request in requests}


class _StepOutputs(Collector):
    """What `step` has yet to return. The loop's thread puts, any thread takes."""

    def __init__(self) -> None:
        self.live: dict[str, RequestOutputKind] = {}  # of requests whose last output has not been taken
        self._outputs: dict[str, RequestOutput] = {}
        self._num_news = 0  # times that the engine has said something
        self._gates: set[Gate] = set()  # of threads that wait
        self._lock = threading.Lock()  # taken by `with`, which Ctrl-C does not split, and never for long

    def put(self, output: RequestOutput) -> None:
        """As OutputCollector's, of every request."""
        with self._lock:
            earlier = self._outputs.get(output.request_id)
            if earlier is not None and self.live.get(output.request_id) == RequestOutputKind.DELTA:
                earlier.add_delta(output)
            else:
                self._outputs[output.request_id] = output

    def fail(self, error: Exception) -> None:
        """Those who wait ask the client why."""
        del error
        self.note_news()

    def note_news(self) -> None:
        """Let those who wait look again."""
        self._num_news += 1
        for gate in list(self._gates):
            gate.open()

    def take(self, check: Callable[[], None], has_more: Callable[[], bool]) -> list[RequestOutput]:
        """Wait for outputs, or news without any. `check` raises why there will be none."""
        gate, num_news = Gate(), self._num_news
        self._gates.add(gate)
        try:
            while True:
                with self._lock:
                    outputs, self._outputs = list(self._outputs.values()), {}
                    for output in outputs:
                        if output.finished:
                            self.live.pop(output.request_id, None)
                if outputs:
                    return outputs
                check()
                if self._num_news != num_news or not has_more():
                    return []
                gate.wait()
        finally:
            self._gates.discard(gate)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Nobody takes their outputs any more."""
        with self._lock:
            for request_id in request_ids:
                self.live.pop(request_id, None)
                self._outputs.pop(request_id, None)
        self.note_news()


def _start_requests(
    client: EngineCoreClient, tokenizer: Tokenizer | None, steps: _StepOutputs
) -> AsyncRequests:
    """In the loop's thread."""
    owner = OwnerLoop()
    owner.take()
    return AsyncRequests(client, tokenizer, owner, on_news=steps.note_news)


def _close_client(client: EngineCoreClient, requests: AsyncRequests) -> None:
    requests.fail(EngineDeadError(CLOSED))
    client.close()


@contextlib.contextmanager
def _starting() -> Generator[LoopThread]:
    """A loop, which ends if this raises."""
    loop = LoopThread()
    try:
        yield loop
    except BaseException:
        loop.close(lambda: None)
        raise
