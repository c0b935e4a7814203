"""A scripted AsyncLLM, and a client that calls an ASGI app without a socket."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Protocol

from frontend_fakes import make_facts, make_stats
from quire.frontend.formats.output_format import OutputFormat
from quire.frontend.http.app import create_app
from quire.frontend.http.connections.auth import ApiKeyMiddleware
from quire.frontend.http.engines.served_models import ServedModels
from quire.frontend.http.errors import ApiError
from quire.frontend.http.options import ServerOptions
from quire.frontend.http.serving import Serving
from quire.frontend.http.stream import GONE_EXTENSION
from quire.frontend.http.text_process.jobs import Refused, TextJob, decode_job, encode_body
from quire.frontend.http.text_process.work import do_job
from quire.frontend.logprobs import Logprob
from quire.frontend.models.model_folder import pocket_folder
from quire.frontend.outputs import CompletionOutput, RequestMetrics, RequestOutput
from quire.frontend.requests.input_processor import InputProcessor, PreparedParams
from quire.frontend.requests.vectors.outputs import PoolingOutput, PoolingRequestOutput
from quire.frontend.requests.vectors.processor import PoolingProcessor, PoolingPrompt
from quire.frontend.text.tokenizer import Tokenizer, load_tokenizer
from quire.ipc.params.beam_search import BeamSearch
from quire.ipc.params.pooling_params import PoolingParams
from quire.ipc.params.request_options import RequestOptions
from quire.ipc.params.sampling_params import RequestOutputKind, SamplingParams
from quire.ipc.protocol.engine_views import EngineHistory, HistoryPoint, SchedulerStats
from quire.ipc.protocol.messages import FrontendCounts
from tool_template import CHATML_TEMPLATE


@dataclass
class Call:
    """What `generate` was called with."""

    prompt: Any  # a text or token ids
    params: SamplingParams
    request_id: str
    options: RequestOptions
    grammar: str = ""


@dataclass
class PoolingCall:
    """What `encode_many` was called with."""

    prompts: list[PoolingPrompt]
    params: PoolingParams
    request_id: str
    fields: Sequence[str]
    prompt: str
    options: RequestOptions


def _pool(token_ids: Sequence[int], width: int, params: PoolingParams) -> bytes:
    if params.is_token_wise:
        return array("f", [float(one) for one in token_ids for _ in range(width)]).tobytes()
    return array("f", [len(token_ids), *token_ids, *([0.0] * width)][:width]).tobytes()


@dataclass
class FakePooling:
    """AsyncLLM's calls that compute vectors."""

    llm: FakeLLM
    processor: PoolingProcessor

    async def encode_many(
        self,
        prompts: Sequence[PoolingPrompt],
        params: PoolingParams,
        request_id: str,
        *,
        fields: Sequence[str],
        prompt: str = "",
        options: RequestOptions,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        call = PoolingCall(list(prompts), params, request_id, fields, prompt, options)
        return await self.llm.pool(self.processor, call)


@functools.cache
def _load_pocket_tokenizer() -> Tokenizer:
    return load_tokenizer(pocket_folder())


class FakeLLM:
    """Answers every prompt with `pieces`, one a turn. A closed `gate` holds everything after the first."""

    def __init__(self, pieces: tuple[str, ...] = ("Hello", " there", "!"), **facts: Any) -> None:
        self.pieces = pieces
        self.num_engines = 1
        folder = str(pocket_folder())
        values: dict[str, Any] = {"model": folder, "tokenizer": folder, "vocab_size": 2048}
        values |= {"max_model_len": 128, "max_num_seqs": 4}
        self.facts = make_facts(**(values | facts))
        self.set_template(CHATML_TEMPLATE)
        self.defaults = SamplingParams()
        self.error: Exception | None = None
        self.error_after = 0  # pieces
        self.holds_first = False
        self.ending: tuple[str, int | str | None] = ("stop", None)  # finish_reason, stop_reason
        self.calls: list[Call] = []
        self.searches: list[BeamSearch] = []
        self.ended: list[str] = []
        self.aborted: set[str] = set()
        self.gate = asyncio.Event()
        self.gate.set()
        self.started = asyncio.Event()  # a first output is on its way
        self._has_changed = asyncio.Event()  # a call has begun or ended
        self._has_died = asyncio.Event()
        self.dead_error: Exception | None = None
        self.num_shutdowns = 0
        self.answered_stats = make_stats()
        self.answered_snapshot: Any = None
        self.counts: list[FrontendCounts] = []
        self.named_aborts: list[tuple[list[str], str]] = []
        self.pooled: list[PoolingCall] = []
        self.num_pooled_ends = 0
        self.num_classes = 1

    def set_template(self, template: str) -> None:
        """Have the pocket model's tokenizer, and this chat template."""
        own = _load_pocket_tokenizer()
        self.tokenizer = Tokenizer(own.backend, own.special_tokens, template)

    @property
    def errored(self) -> bool:
        return self.dead_error is not None

    @property
    def is_running(self) -> bool:
        return not self.errored

    @property
    def is_recovering(self) -> bool:
        return False

    @property
    def output_format(self) -> OutputFormat | None:
        """Of markers that are text: no piece has a token of its own."""
        found = InputProcessor(self.facts, self.tokenizer).output_format
        return None if found is None else dataclasses.replace(found, token_ids={})

    async def start(self, _on_phase: Any = None) -> None:
        await asyncio.sleep(0)

    def shutdown(self) -> None:
        self.num_shutdowns += 1

    def die(self, error: Exception) -> None:
        """From now on the engine is gone."""
        self.dead_error = error
        self._has_died.set()

    async def wait_until_dead(self) -> None:
        await self._has_died.wait()

    async def wait_for_calls(self, num_begun: int, num_ended: int = 0) -> None:
        """Until that many have begun, and that many have ended."""
        while len(self.calls) < num_begun or len(self.ended) < num_ended:
            self._has_changed.clear()
            await self._has_changed.wait()

    async def snapshot(self) -> Any:
        if self.answered_snapshot is None:
            raise self.dead_error or NotImplementedError
        return self.answered_snapshot

    async def history_by_engine(self) -> dict[int, EngineHistory]:
        return {0: EngineHistory(at=7.0, period_s=5.0, kv_blocks_total=64, points=[HistoryPoint(at=5.0)])}

    async def stats(self) -> SchedulerStats:
        return self.answered_stats

    async def metrics(self) -> Any:
        raise self.dead_error or NotImplementedError

    def get_default_sampling_params(self) -> SamplingParams:
        return self.defaults

    async def abort(self, request_ids: list[str]) -> None:
        self.aborted.update(request_ids)
        self.gate.set()

    def abort_named(self, names: list[str], tenant: str) -> None:
        self.named_aborts.append((names, tenant))

    def prepare_params(
        self, params: SamplingParams, encoded: Any = None, *, search: BeamSearch | None = None
    ) -> PreparedParams:
        processor = InputProcessor(self.facts, self.tokenizer)
        if search is not None:
            self.searches.append(search)
            return processor.prepare_beam_search(params, search, "n")
        return processor.prepare_params(params, encoded)

    @property
    def pooling(self) -> FakePooling:
        return FakePooling(self, PoolingProcessor(self.facts, self.tokenizer))

    async def pool(
        self, processor: PoolingProcessor, call: PoolingCall
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Of each prompt: its number of tokens, then their ids, as far as a vector goes."""
        self.pooled.append(call)
        self._has_changed.set()
        try:
            each = [call.params] * len(call.prompts)
            given = processor.tokenize(call.prompts, each, call.fields, prompt=call.prompt)
            self.started.set()
            await self.gate.wait()
            if self.error is not None:
                raise self.error
        finally:
            self.num_pooled_ends += 1
            self._has_changed.set()
        width = call.params.dimensions or self.facts.embedding_size or self.num_classes
        outputs = [PoolingOutput(_pool(one.token_ids, width, call.params)) for one in given]
        return [
            PoolingRequestOutput(f"{call.request_id}-{place}", output, one.token_ids, 0)
            for place, (one, output) in enumerate(zip(given, outputs, strict=True))
        ]

    def add_counts(self, counts: FrontendCounts) -> None:
        self.counts.append(counts)

    async def generate(
        self, prompt: Any, prepared: PreparedParams, request_id: str, *, options: RequestOptions
    ) -> AsyncGenerator[RequestOutput, None]:
        params = prepared.sampling_params
        self.calls.append(Call(prompt, params, request_id, options, prepared.grammar))
        self._has_changed.set()
        try:
            ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            if params.output_kind == RequestOutputKind.FINAL_ONLY:
                self.started.set()
                await self.gate.wait()
                if self.error is not None:
                    raise self.error
                yield self._output(request_id, ids, params, "".join(self.pieces), True)
                return
            for place, piece in enumerate(self.pieces):
                if self.error is not None and place == self.error_after:
                    raise self.error
                if place == 1 or self.holds_first:
                    await self.gate.wait()
                is_last = place == len(self.pieces) - 1 or request_id in self.aborted
                yield self._output(request_id, ids, params, piece, is_last)
                self.started.set()
                if is_last:
                    return
                await asyncio.sleep(0)
        finally:
            self.ended.append(request_id)
            self._has_changed.set()

    def _output(
        self, request_id: str, ids: list[int], params: SamplingParams, text: str, is_last: bool
    ) -> RequestOutput:
        reason = ("abort" if request_id in self.aborted else self.ending[0]) if is_last else None
        stop = self.ending[1] if is_last else None
        logprobs: Any = [{7: Logprob(-0.5, 1, text), 8: Logprob(float("-inf"), 2, "b")}]
        outputs = [
            CompletionOutput(
                index, text, [7], None, logprobs if params.logprobs is not None else None, reason, stop
            )
            for index in range(params.n)
        ]
        of_prompt: Any = None
        if params.prompt_logprobs is not None:
            of_prompt = [None, *({token: Logprob(-1.0, 1, "ab")} for token in ids[1:])]
        metrics = RequestMetrics(arrival_time=0.0, num_generation_tokens=len(self.pieces) * params.n)
        return RequestOutput(
            request_id,
            None,
            ids,
            of_prompt,
            outputs,
            is_last,
            metrics if is_last else None,
            num_cached_tokens=3,
        )


class InlineText:
    """Text jobs done at once and here, as a text process does them. Notes them, with their tenants."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.jobs: list[tuple[TextJob, str]] = []

    def start(self) -> None:
        pass

    def close(self) -> None:
        pass

    async def run(self, job: TextJob, tenant: str) -> Any:
        self.jobs.append((job, tenant))
        answer = do_job(self._tokenizer, decode_job(encode_body(job)))
        if isinstance(answer, Refused):
            raise ApiError(HTTPStatus.BAD_REQUEST, answer.message, param=answer.field, code=answer.code)
        return answer


@dataclass
class Answer:
    """What an app sent."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """The data of a stream's events; '[DONE]' as it is."""
        lines = [line for line in self.body.decode().split("\n") if line.startswith("data: ")]
        return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


class AsgiClient:
    """Calls an app as a server does; `leave` makes the client go away."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.gone = asyncio.Event()
        self._on_gone: list[Callable[[], None]] = []
        self.address = "127.0.0.1"

    def leave(self) -> None:
        self.gone.set()
        for on_gone in self._on_gone:
            on_gone()

    def at(self, address: str) -> AsgiClient:
        """Another of the same app, which comes from there."""
        other = AsgiClient(self.app)
        other.address = address
        return other

    async def get(self, path: str, **headers: str) -> Answer:
        return await self.call("GET", path, b"", headers)

    async def post(self, path: str, body: Any, **headers: str) -> Answer:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.call("POST", path, data, {"content_type": "application/json"} | headers)

    async def call(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> Answer:
        answer = Answer()
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        path, _, query = path.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "scheme": "http",
            "headers": [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()],
            "client": (self.address, 1),
            "server": ("127.0.0.1", 80),
            "state": {},
        }
        told: list[Callable[[], None]] = []

        def tell_when_gone(on_gone: Callable[[], None] | None) -> None:
            if on_gone is None:
                self._on_gone.remove(told.pop())
                return
            told.append(on_gone)
            self._on_gone.append(on_gone)
            if self.gone.is_set():
                on_gone()

        scope["extensions"] = {GONE_EXTENSION: tell_when_gone}

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await self.gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                answer.status = message["status"]
                answer.headers = {k.decode(): v.decode() for k, v in message["headers"]}
            else:
                answer.body += message.get("body", b"")

        await self.app(scope, receive, send)
        return answer


CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]


def chat(**fields: Any) -> dict[str, Any]:
    """The body of a chat request."""
    return {"model": "fake", "messages": MESSAGES, **fields}


@dataclass
class OpenApp:
    """An app that takes requests, over a FakeLLM."""

    llm: FakeLLM
    client: AsgiClient
    serving: Serving

    def check_ended(self) -> None:
        """No request is under way any more."""
        assert self.serving.capacity.num_sequences == 0
        assert len(self.llm.ended) == len(self.llm.calls)


def make_app(options: ServerOptions | None = None, template: str | None = None, **facts: Any) -> OpenApp:
    """template: in place of the model's own. facts: the engine's, and `pieces`."""
    llm = FakeLLM(**facts)
    if template is not None:
        llm.set_template(template)
    options = options or ServerOptions()
    models = ServedModels.of_one(llm, options)  # type: ignore[arg-type]
    serving = models.only
    serving._text = InlineText(llm.tokenizer)  # type: ignore[assignment]
    serving.open()
    client = AsgiClient(ApiKeyMiddleware(create_app(models), options.api_key_hashes, options.server_id))
    return OpenApp(llm, client, serving)


class OpenApps(Protocol):
    """Opens another app, as `make_app`."""

    def __call__(self, **how: Any) -> OpenApp: ...
