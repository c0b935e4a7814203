"""LLMEngine: the synchronous engine, one step at a time. Owns a client, and the processors on its two sides.

One thread at a time may use it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from ..ipc.config import EngineConfig
from ..ipc.errors import QuireError, RequestFailedError
from ..ipc.messages import EngineFacts, EngineMetrics, EngineSnapshot, SchedulerStats, UtilityMethod
from ..ipc.sampling_params import SamplingParams
from .engine_args import EngineArgs
from .engine_core_client import SyncClient, attach_sync_client, make_sync_client
from .hf_config import read_default_sampling
from .input_processor import EngineInput, InputProcessor, Prompt
from .model_files import read_json
from .output_processor import OutputProcessor
from .outputs import RequestOutput
from .tokenizer import Tokenizer, load_tokenizer


class LLMEngine:
    """Requests in, outputs out: `add_request`, then `step` until `has_unfinished_requests` is False.

    Every request ends in exactly one RequestOutput with `finished`, also when it is aborted (finish_reason
    'abort') or the engine fails it ('error', with the cause in `RequestOutput.error`).
    """

    def __init__(
        self, client: SyncClient, tokenizer: Tokenizer | None, generation_config: str = "auto"
    ) -> None:
        self._client = client
        self.tokenizer = tokenizer
        self.input_processor = InputProcessor(client.facts, tokenizer)
        self._output_processor = OutputProcessor(tokenizer)
        self._generation_config = generation_config

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, on_phase: Callable[[str], None] | None = None) -> Self:
        """Check the arguments, start the engine's processes and wait until they are ready.

        `on_phase` is told each start-up phase as it begins. Raises ConfigError, ModelError, EngineStartError.
        """
        config = engine_args.create_engine_config()
        # The tokenizer is read while the engine starts in its own processes.
        with ThreadPoolExecutor(max_workers=1) as pool:
            loading = pool.submit(load_model_tokenizer, config)
            client = make_sync_client(config, on_phase)
        try:
            return cls(client, loading.result(), engine_args.generation_config)
        except BaseException:
            client.close()
            raise

    @classmethod
    def attach(cls, name: str, *, client_kind: str = "LLMEngine", weight: float = 1.0) -> Self:
        """Come to the running daemon `name`; `close` leaves it running.

        Raises DaemonError if there is none, ConfigError for a name that cannot be one.
        """
        client = attach_sync_client(name, client_kind, weight)
        try:
            return cls(client, load_served_tokenizer(client.facts), client.facts.generation_config)
        except BaseException:
            client.close()
            raise

    @property
    def facts(self) -> EngineFacts:
        """What the engine says of itself; process ids change when a process is replaced."""
        return self._client.facts

    @property
    def startup(self) -> list[tuple[str, float]]:
        """(phase, seconds) of the start, in order; the sum is the wall time."""
        return self._client.startup

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        arrival_time: float | None = None,
        *,
        priority: int = 0,
        tenant: str = "",
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
    ) -> None:
        """Check a request and hand it to the engine.

        priority: lower runs first, if the policy asks for it. tenant: whose request it is under the fair
        policy, '' for this client's own. timeout_s: it ends with 'abort' and what it has so many seconds
        after it came to the engine. queue_timeout_s: it ends with 'error' if it has not begun by then.
        Raises PromptError, SamplingParamsError, InputError (a live request has this id), EngineDeadError.
        """
        sampling = SamplingParams() if params is None else params
        made = self.input_processor.process(
            request_id,
            prompt,
            sampling,
            priority,
            arrival_time,
            tenant=tenant,
            timeout_s=timeout_s,
            queue_timeout_s=queue_timeout_s,
        )
        self.add_input(made)

    def add_input(self, request: EngineInput) -> None:
        """Hand a request to the engine that `input_processor` has made."""
        self._output_processor.add_request(request)
        try:
            for sequence in request.sequences:
                self._client.add_request(sequence)
        except BaseException:  # what the engine has of it would run for nobody
            self.forget_requests([request.request_id])
            raise

    def step(self) -> list[RequestOutput]:
        """Wait for what the engine generates next and return what is to be delivered of it, perhaps nothing.

        Returns at once when no request is unfinished. Raises EngineDeadError.
        """
        if not self.has_unfinished_requests():
            return []
        processed = self._output_processor.process_outputs(self._client.get_outputs())
        if processed.ids_to_abort:
            self._client.abort_requests(processed.ids_to_abort)
        return processed.request_outputs

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests; each one's final output comes from `step`. Unknown ids are ignored."""
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        engine_ids = self._output_processor.find_engine_ids(ids)
        if engine_ids:
            self._client.abort_requests(engine_ids)

    def forget_requests(self, request_ids: Iterable[str]) -> None:
        """End requests whose outputs nobody will read. Never raises for an engine that has died."""
        engine_ids = self._output_processor.forget_requests(request_ids)
        if engine_ids:
            with contextlib.suppress(QuireError):
                self._client.abort_requests(engine_ids)

    def has_unfinished_requests(self) -> bool:
        return self._output_processor.num_unfinished > 0

    def get_num_unfinished_requests(self) -> int:
        return self._output_processor.num_unfinished

    def get_tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None with skip_tokenizer_init."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What is used when a caller of LLM gives none: generation_config.json's values, if it has any."""
        return make_default_sampling_params(self.facts, self._generation_config)

    def reset_prefix_cache(self) -> bool:
        """Forget cached prompt beginnings; False while requests hold them."""
        return self._client.call_utility(UtilityMethod.RESET_PREFIX_CACHE).error is None

    def stats(self) -> SchedulerStats:
        """A look at the engine at this moment."""
        result = self._client.call_utility(UtilityMethod.STATS)
        if result.stats is None:
            raise RequestFailedError(result.error or "the engine gave no stats")
        return result.stats

    def snapshot(self) -> EngineSnapshot:
        """What live views show: requests, blocks, clients, and rates over the last seconds."""
        result = self._client.call_utility(UtilityMethod.SNAPSHOT)
        if result.snapshot is None:
            raise RequestFailedError(result.error or "the engine gave no snapshot")
        return result.snapshot

    def metrics(self) -> EngineMetrics:
        """What the engine has counted since it started, over all its clients."""
        result = self._client.call_utility(UtilityMethod.METRICS)
        if result.metrics is None:
            raise RequestFailedError(result.error or "the engine gave no metrics")
        return result.metrics

    def check_integrity(self) -> str | None:
        """What is wrong with the engine's block accounting, None if nothing is."""
        return self._client.call_utility(UtilityMethod.CHECK_INTEGRITY).error

    def close(self) -> None:
        """End the engine and its processes within 2 s. Idempotent."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc_info: Any) -> None:
        self.close()


def load_model_tokenizer(config: EngineConfig) -> Tokenizer | None:
    """The tokenizer that a config names, None when it names none."""
    return load_tokenizer(config.model.tokenizer) if config.model.tokenizer else None


def load_served_tokenizer(facts: EngineFacts) -> Tokenizer | None:
    """The tokenizer of an engine that runs, None when it has none."""
    return load_tokenizer(facts.tokenizer) if facts.tokenizer else None


def make_default_sampling_params(facts: EngineFacts, generation_config: str) -> SamplingParams:
    """SamplingParams with the model's generation_config.json applied if `generation_config` is 'auto'."""
    if generation_config != "auto":
        return SamplingParams()
    return SamplingParams(**read_default_sampling(read_json(Path(facts.model) / "generation_config.json")))
