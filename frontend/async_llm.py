"""AsyncLLM: one async generator a request over one engine. Belongs to the event loop it is started in."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Self, Unpack

from ..ipc.errors import ConfigError, EngineDeadError, RequestFailedError
from ..ipc.params.absent_arguments import check_absent
from ..ipc.params.beam_search import BeamSearch, BeamSearchParams
from ..ipc.params.pooling_params import PoolingParams, PoolingTask
from ..ipc.params.request_options import NO_OPTIONS, RequestKeywords, RequestOptions, read_options
from ..ipc.params.sampling_params import SamplingParams
from ..ipc.protocol.messages import EngineFacts, FrontendCounts, UtilityMethod, UtilityResult
from .client.async_requests import AsyncRequests, OutputCollector, OwnerLoop
from .client.utility_calls import UtilityCalls
from .options.engine_args import EngineArgs
from .outputs import RequestOutput
from .requests.beam_search import BeamSearchOutput, prepare_beam_search, to_beam_search_output
from .requests.input_processor import InputProcessor, PreparedParams
from .requests.prompts import Prompt
from .text.tokenizer import Tokenizer

if TYPE_CHECKING:  # what reaches engines, with its sockets and processes, is loaded when one is wanted
    from .client.async_engine_core_client import AsyncMPClient
    from .client.remote_daemon import Attachment
    from .formats.output_format import OutputFormat
    from .requests.vectors.outputs import PoolingOutput, PoolingRequestOutput
    from .requests.vectors.processor import PoolingPrompt
    from .vector_calls import AsyncPooling

_SHUTDOWN_WAIT_S = 5.0  # for a loop in another thread to do it; it is done later if that loop is busy


class AsyncLLM(UtilityCalls):
    """An engine for an asyncio program: one of its own, or with `attach` the one of a running daemon.

    Started by `start`, `async with` or the first `generate`; `shutdown` ends it, or leaves a daemon running.
    It belongs to the event loop in which that happens: calls from another one raise WrongEventLoopError, also
    after that loop has ended. `shutdown` may come from anywhere. After it, and in a fork, every call raises
    EngineDeadError. Its state (`errored`, `is_running`, `is_recovering`) can be asked anywhere at any time.
    """

    def __init__(
        self,
        engine_args: EngineArgs | None = None,
        *,
        attach: Attachment | None = None,
        keys: str | os.PathLike[str] | None = None,
        model: str | os.PathLike[str] | None = None,
        tokenizer: str | os.PathLike[str] | None = None,
        client_kind: str = "AsyncLLM",
        client_weight: float = 1.0,
    ) -> None:
        """Check the arguments; nothing is started. Raises ConfigError or ModelError.

        attach: a daemon's name, instead of engine_args. keys, model, tokenizer: as LLM's, with a daemon of
        another machine. client_kind: what people who look at the daemon see;
        client_weight: this client's share there under the fair policy.
        """
        from .client.remote_daemon import check_unattached, choose_attachment

        if attach is not None and engine_args is not None:
            raise ConfigError(
                "attach", attach, "no engine arguments beside it: the daemon's engine has its own"
            )
        if attach is None:
            check_unattached(keys=keys, model=model, tokenizer=tokenizer)
        self._attach = "" if attach is None else choose_attachment(attach, keys, model, tokenizer)
        self._client_kind, self._client_weight = client_kind, client_weight
        self._config = (engine_args or EngineArgs()).create_engine_config() if attach is None else None
        self._seed = engine_args.seed if engine_args is not None else None
        self._start_lock = asyncio.Lock()
        self._loop = OwnerLoop()
        self._client: AsyncMPClient | None = None
        self._request_numbers = itertools.count()
        self._is_shut_down = False
        self._has_died = asyncio.Event()  # dead_error is set
        self.dead_error: Exception | None = None
        self.tokenizer: Tokenizer | None = None

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **others: Any) -> Self:
        """vLLM's spelling of the constructor; needs no event loop. others: vLLM's that ask for nothing."""
        check_absent(others, ())
        return cls(engine_args)

    async def start(self, on_phase: Callable[[str], None] | None = None) -> None:
        """Start the engine and wait until it is ready; does nothing when it already is.

        Raises EngineStartError, or EngineDeadError after `shutdown`.
        """
        from .engine_start import start_engine

        self._check_open()
        # A loop that runs the engine, or may still, keeps it.
        if self._client is None and not self._loop.is_alive:
            self._loop.take()
            self._start_lock = asyncio.Lock()
        self._loop.check()
        async with self._start_lock:
            self._check_open()
            if self._client is not None:
                return
            if self._config is None:
                client, tokenizer = await _attach(
                    self._attach, self._client_kind, self._client_weight, on_phase
                )
            else:
                client, tokenizer = await start_engine(self._config, on_phase)
            if self._is_shut_down:  # meanwhile
                client.close()
                self._check_open()
            self.tokenizer = tokenizer
            self._input_processor = InputProcessor(client.facts, self.tokenizer, self._seed)
            self._client = client
            self._requests = AsyncRequests(client, tokenizer, self._loop, on_death=self._note_death)

    @property
    def facts(self) -> EngineFacts:
        """The running engine's facts; EngineDeadError before `start`."""
        return self._running_client().facts

    @property
    def output_format(self) -> OutputFormat | None:
        """How the model writes thoughts and tool calls; None: only text. EngineDeadError before `start`."""
        self._running_client()
        return self._input_processor.output_format

    @property
    def num_engines(self) -> int:
        """Engines that share the requests, those included that are being restarted."""
        return self._running_client().num_engines

    @property
    def errored(self) -> bool:
        """Whether the engine has died and is not started again; `dead_error` says why."""
        return self.dead_error is not None

    @property
    def is_running(self) -> bool:
        """Whether it takes requests: the engine lives or is being restarted, and this is not shut down."""
        has_client = self._client is not None and not self.errored and not self._is_shut_down
        return has_client and self._loop.is_alive

    @property
    def is_recovering(self) -> bool:
        """True while the engine is being restarted: requests wait, and go on afterwards."""
        return self.is_running and self._client is not None and not self._client.is_connected

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | PreparedParams | None = None,
        request_id: str | None = None,
        *,
        options: RequestOptions = NO_OPTIONS,
        **keywords: Unpack[RequestKeywords],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one request, as SamplingParams.output_kind says, until one is `finished`.

        Closing the generator, or cancelling the task that reads it, aborts the request. A reader that falls
        behind gets deltas merged. sampling_params None takes the model's defaults, and those that
        `prepare_params` has checked are not checked again; request_id None makes one.
        keywords: as LLMEngine.add_request; names: for `abort_named`. options: all of them in one, which
        keywords override.
        Raises ValueErrors for bad input, RequestFailedError when the engine fails this request,
        EngineDeadError when the engine is gone.
        """
        await self.start()
        params = sampling_params or self.get_default_sampling_params()
        name = f"request-{next(self._request_numbers)}" if request_id is None else request_id
        process = functools.partial(
            self._input_processor.process,
            name,
            prompt,
            params,
            read_options(options, **keywords),
            drawn_seed=self._input_processor.seeds.draw(),  # here: long prompts are processed in any order
        )
        is_long = self._input_processor.takes_long(prompt, params)
        request = await asyncio.to_thread(process) if is_long else process()
        del prompt, process  # which the reader would hold until the end
        self._running_client()  # it may have ended meanwhile
        collector = OutputCollector(request.params.output_kind)
        self._requests.add([request], collector)
        is_finished = False
        try:
            while not is_finished:
                self._loop.check()
                output = await collector.take()
                if output.error is not None:
                    raise RequestFailedError(output.error, output.error_code)
                is_finished = output.finished
                yield output
        finally:
            self._requests.leave([name], is_finished, collector)

    async def encode(
        self,
        prompt: PoolingPrompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        task: PoolingTask | None = None,
        **options: Any,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        """The one output of a request for a vector; `pooling.encode_many` takes many, and the same `options`.

        task: that of the params, else 'embed'. What is raised, and ends it, is as for `generate`; one that
        somebody aborts raises RequestFailedError.
        """
        await self.start()
        (output,) = await self.pooling.encode_many(
            [prompt], pooling_params, request_id, task=task, fields=["prompt"], **options
        )
        yield output

    @functools.cached_property
    def pooling(self) -> AsyncPooling:
        """Calls that compute vectors of many prompts at once; EngineDeadError before `start`."""
        from .requests.vectors.processor import PoolingProcessor
        from .vector_calls import AsyncPooling

        processor = PoolingProcessor(self.facts, self.tokenizer)
        return AsyncPooling(processor, self._requests, self._running_client)

    async def beam_search(
        self, prompt: Prompt, params: BeamSearchParams, request_id: str | None = None, **options: Any
    ) -> BeamSearchOutput:
        """The `beam_width` best sequences, best first. `options`, and what is raised, as for `generate`."""
        await self.start()
        prepared = prepare_beam_search(self._input_processor, params)
        last: RequestOutput | None = None
        async with contextlib.aclosing(self.generate(prompt, prepared, request_id, **options)) as outputs:
            async for output in outputs:
                last = output
        assert last is not None, "every request ends in a final output"
        return to_beam_search_output(last, self.tokenizer, params.include_stop_str_in_output)

    def prepare_params(
        self,
        params: SamplingParams,
        encoded_bad_words: list[list[int]] | None = None,
        *,
        search: BeamSearch | None = None,
    ) -> PreparedParams:
        """InputProcessor.prepare_params, for many calls of `generate`; only after `start`.

        search: prepare_beam_search instead, whose width the user calls n.
        """
        self._running_client()
        if search is not None:
            return self._input_processor.prepare_beam_search(params, search, "n")
        return self._input_processor.prepare_params(params, encoded_bad_words)

    async def wait_until_dead(self) -> None:
        """Returns when the engine is gone for good, with `dead_error` set, or after `shutdown`."""
        self._loop.check()
        await self._has_died.wait()

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests; each generator gets a final output with finish_reason 'abort', at once."""
        self._loop.check()
        self._check_open()
        ids = [request_id] if isinstance(request_id, str) else request_id
        if self._client is not None:
            self._running_client()
            self._requests.abort(ids)

    def abort_named(self, names: Sequence[str], tenant: str = "") -> None:
        """As EngineCoreClient.abort_named."""
        self._running_client().abort_named(names, tenant)

    def add_counts(self, counts: FrontendCounts) -> None:
        """Have the engine's `metrics` count what was found here; nothing while it is being restarted."""
        self._running_client().add_counts(counts)

    def get_tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None before `start` and with skip_tokenizer_init."""
        self._loop.check()
        self._check_open()
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses when it is given none."""
        from .engine_start import read_served_sampling

        return SamplingParams(**read_served_sampling(self.facts))

    def shutdown(self) -> None:
        """End the engine within 2 s; generators that still run raise EngineDeadError. Idempotent.

        From any thread, also when its event loop has been closed. In a fork it does nothing.
        """
        self._is_shut_down = True
        is_done = threading.Event()
        if not self._loop.do(lambda: self._end(is_done)):
            is_done.wait(_SHUTDOWN_WAIT_S)
        if self.tokenizer is not None:
            self.tokenizer.close()

    def _end(self, is_done: threading.Event) -> None:
        try:
            with contextlib.suppress(RuntimeError):  # its loop has been closed: then nobody waits for it
                error = EngineDeadError("this AsyncLLM has been shut down")
                self._note_death(error)
                if self._client is not None:
                    self._requests.fail(error)
                    self._requests.stop()
            if self._client is not None:
                self._client.close()
        finally:
            is_done.set()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_exc_info: Any) -> None:
        self.shutdown()

    def _check_open(self) -> None:
        if self._is_shut_down:
            raise EngineDeadError("this AsyncLLM has been shut down")

    def _running_client(self) -> AsyncMPClient:
        self._loop.check()
        self._check_open()
        if self.dead_error is not None:
            raise EngineDeadError(str(self.dead_error)) from self.dead_error
        if self._client is None:
            raise EngineDeadError("the engine is not running; `await start()` first")
        return self._client

    def _note_death(self, error: Exception) -> None:
        self.dead_error = self.dead_error or error
        self._has_died.set()

    async def call_each(self, method: UtilityMethod) -> dict[int, UtilityResult]:
        return await self._running_client().call_each(method)


async def _attach(
    daemon: Attachment, client_kind: str, weight: float, on_phase: Callable[[str], None] | None
) -> tuple[AsyncMPClient, Tokenizer | None]:
    from .client.async_engine_core_client import attach_async_client
    from .engine_start import load_served_tokenizer

    client = await attach_async_client(daemon, client_kind, weight, on_phase)
    try:
        return client, await asyncio.to_thread(load_served_tokenizer, client.facts)
    except BaseException:
        client.close()
        raise
