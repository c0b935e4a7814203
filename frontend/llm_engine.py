"""LLMEngine: the synchronous engine, one step at a time. Owns a client and the processors beside it."""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self, Unpack

from ..ipc.errors import EngineDeadError, QuireError
from ..ipc.files.file_identity import check_served
from ..ipc.params.request_options import RequestKeywords, read_options
from ..ipc.params.sampling_params import SamplingParams
from ..ipc.protocol.messages import EngineFacts, UtilityMethod, UtilityResult
from .client.engine_core_client import (
    UTILITY_TIMEOUT_S,
    SyncClient,
    attach_sync_client,
    make_call_timeout,
    make_sync_client,
)
from .client.remote_daemon import Attachment
from .client.turns import Turns
from .client.utility_calls import UtilityCalls
from .models.hf_config import read_default_sampling
from .models.model_files import read_json
from .options.engine_args import EngineArgs
from .outputs import RequestOutput
from .requests.input_processor import EngineInput, InputProcessor
from .requests.output_processor import OutputProcessor, Sink
from .requests.prompts import Prompt
from .requests.vectors.state import PoolingInput
from .text.tokenizer import Tokenizer, load_tokenizer

_ADDED_IN_A_TURN = 32  # requests: about a millisecond for which other threads, and Ctrl-C, wait


class LLMEngine(UtilityCalls):
    """Requests in, outputs out: `add_request`, then `step` until `has_unfinished_requests` is False.

    Every request ends in exactly one RequestOutput with `finished`, also when it is aborted (finish_reason
    'abort') or the engine fails it ('error', with the cause in `RequestOutput.error`).

    Any thread may call anything at any time: calls take turns, and none waits for one that waits. Ctrl-C
    leaves it usable. After `close`, and in a fork of this process, every call raises EngineDeadError but
    `startup`, `forget_requests` and `close` itself.
    """

    def __init__(self, client: SyncClient, tokenizer: Tokenizer | None, seed: int | None = None) -> None:
        """seed: of requests without one, see SeedSource."""
        self._client = client
        self.tokenizer = tokenizer
        self.input_processor = InputProcessor(client.facts, tokenizer, seed)
        self._output_processor = OutputProcessor(tokenizer)
        self._turns = Turns(client)
        self._arrived: deque[RequestOutput] = deque()  # for `step`
        self._num_received = 0  # times that the engine has said something
        self._finalizer = weakref.finalize(self, _close_in_turn, client, self._turns)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, on_phase: Callable[[str], None] | None = None) -> Self:
        """Check the arguments, start the engine's processes and wait until they are ready.

        `on_phase` is told each start-up phase as it begins. Raises ConfigError, ModelError, EngineStartError.
        """
        config = engine_args.create_engine_config()
        # The tokenizer is read while the engine starts in its own processes.
        with ThreadPoolExecutor(max_workers=1) as pool:
            loading = pool.submit(load_named_tokenizer, config.model.tokenizer, config.model.chat_template)
            client = make_sync_client(config, on_phase)
        try:
            return cls(client, loading.result(), engine_args.seed)
        except BaseException:
            client.close()
            raise

    @classmethod
    def attach(cls, daemon: Attachment, *, client_kind: str = "LLMEngine", weight: float = 1.0) -> Self:
        """Attach to a running daemon, which `close` leaves. Raises DaemonError, ConfigError for a bad name.

        `daemon`: its name, or what `choose_attachment` says of one on another machine.
        """
        client = attach_sync_client(daemon, client_kind, weight)
        try:
            return cls(client, load_served_tokenizer(client.facts))
        except BaseException:
            client.close()
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
        self._turns.check_owner()
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
        self.add_inputs([made], None)

    def add_inputs(self, requests: Sequence[EngineInput | PoolingInput], sink: Sink | None) -> None:
        """Hand requests to the engine that were made of prompts, for instance by `input_processor`.

        Their outputs go to `sink`, in whichever thread receives them; None: `step` returns them. Raises with
        some of those before the one at fault added.
        """
        for start in range(0, len(requests), _ADDED_IN_A_TURN):
            with self._turns:
                self._add(requests[start : start + _ADDED_IN_A_TURN], sink)

    def step(self) -> list[RequestOutput]:
        """Wait for what the engine generates next and return what is to be delivered of it, perhaps nothing.

        Returns at once when no request is unfinished. Raises EngineDeadError.
        """
        if not self._arrived:
            self.check_usable()
        num_before = self._num_received
        self.wait_for(
            lambda: (
                bool(self._arrived)
                or self._num_received != num_before
                or not self._output_processor.num_unfinished
            )
        )
        outputs: list[RequestOutput] = []
        with contextlib.suppress(IndexError):  # empty: perhaps another thread's step was faster
            while True:
                outputs.append(self._arrived.popleft())
        return outputs

    def wait_for(self, is_served: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until `is_served()`, which is asked after everything that arrives; False after `timeout_s`.

        It may look at what sinks have taken. Raises EngineDeadError when the engine has ended.
        """
        return self._turns.wait_for(is_served, self._receive, timeout_s)

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests; each one's final output comes from `step`. Unknown ids are ignored."""
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        with self._turns:
            self._client.check_usable()
            if engine_ids := self._output_processor.find_engine_ids(ids):
                self._client.abort_requests(engine_ids)

    def abort_named(self, names: Sequence[str], tenant: str = "") -> None:
        """End requests of any client by name or by the id that live views show; '': of every tenant."""
        with self._turns:
            self._client.abort_named(names, tenant)

    def forget_requests(self, request_ids: Iterable[str]) -> None:
        """End requests whose outputs nobody will read. Never raises for an engine that has died."""
        with contextlib.suppress(QuireError), self._turns:
            if engine_ids := self._output_processor.forget_requests(list(request_ids)):
                self._client.abort_requests(engine_ids)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has outputs still to come."""
        return self.get_num_unfinished_requests() > 0

    def get_num_unfinished_requests(self) -> int:
        """Requests whose last output `step` has yet to return."""
        self._check_open()
        return self._output_processor.num_unfinished

    def get_tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None with skip_tokenizer_init."""
        self._check_open()
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What is used when a caller of LLM gives none: generation_config.json's values, if it has any."""
        return SamplingParams(**read_served_sampling(self.facts))

    def close(self) -> None:
        """End the engine and its processes within 2 s. Idempotent, from any thread; nothing in a fork.

        Calls that wait in other threads raise EngineDeadError.
        """
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc_info: Any) -> None:
        self.close()

    def _check_open(self) -> None:
        """Raise after `close` and in a fork; what needs no engine is still said of one that has died."""
        self._turns.check_owner()
        if not self._finalizer.alive:
            raise EngineDeadError("the engine was closed")

    def _add(self, requests: Sequence[EngineInput | PoolingInput], sink: Sink | None) -> None:
        added: list[str] = []
        try:
            for request in requests:
                self._output_processor.add_request(request, sink)
                added.append(request.request_id)
            self._client.add_requests([one for request in requests for one in request.sequences])
        except BaseException:  # what the engine has of it would run for nobody
            self.forget_requests(added)
            raise

    def _call_each(self, method: UtilityMethod) -> dict[int, UtilityResult]:
        client = self._client
        with self._turns:
            client.check_usable()
            indexes = list(client.engines)
            if len(indexes) < 2:  # if the others or all are away, one that comes back may answer as well
                calls = {next(iter(indexes), 0): client.start_call(method)}
            else:
                calls = {index: client.start_call(method, index) for index in indexes}
        try:
            answers: dict[int, UtilityResult | None] = {}

            def are_there() -> bool:
                answers.update({index: client.find_answer(call_id) for index, call_id in calls.items()})
                return None not in answers.values()

            if not self.wait_for(are_there, UTILITY_TIMEOUT_S):
                raise make_call_timeout(method, UTILITY_TIMEOUT_S)
            return {index: answer for index, answer in answers.items() if answer is not None}
        finally:
            for call_id in calls.values():
                client.end_call(call_id)

    def _receive(self) -> bool:
        """Take in, within a turn, what the engine has said; False if that was nothing."""
        outputs = self._client.read()
        if not outputs:
            return False
        self._num_received += 1
        processed = self._output_processor.process_outputs(outputs)
        self._arrived += processed.request_outputs
        if processed.ids_to_abort:
            self._client.abort_requests(processed.ids_to_abort)
        return True


def _close_in_turn(client: SyncClient, turns: Turns) -> None:
    """For a finalizer too: at exit another thread may be in a turn."""
    if not turns.is_forked:
        with turns:
            client.close()


def load_named_tokenizer(folder: str, chat_template: str | None) -> Tokenizer | None:
    """The tokenizer that a config or an engine's facts name, None when that is ''."""
    return load_tokenizer(folder, chat_template) if folder else None


def load_served_tokenizer(facts: EngineFacts) -> Tokenizer | None:
    """That of an engine that runs, if its files are still those that it was started with.

    Raises FilesChangedError.
    """
    check_served(facts.noted, facts.model, facts.tokenizer)
    tokenizer = load_named_tokenizer(facts.tokenizer, facts.chat_template)
    check_served(facts.noted, facts.model, facts.tokenizer)  # they may have been replaced meanwhile
    return tokenizer


def read_served_sampling(facts: EngineFacts) -> dict[str, Any]:
    """What the model recommends in its generation_config.json, if the engine is to use it."""
    if facts.generation_config != "auto":
        return {}
    return read_default_sampling(read_json(Path(facts.model) / "generation_config.json"))
