"""The services: QuireEngine of quire_engine.proto, over the models that HTTP's routes serve, and
grpc.health.v1.Health: whether the server takes requests, as HTTP's /health says. Its Check needs no key.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Generator
from contextlib import aclosing
from http import HTTPStatus

from grpc_health.v1 import health_pb2

from ...ipc.errors import describe_refusal
from ..http.dialects.completions import admit_completion
from ..http.dialects.logprobs import make_beside
from ..http.engines.served_models import WELL, ServedModels
from ..http.errors import ApiError, FieldError
from ..http.observe.access_log import note_request_id
from ..http.serving import Serving, make_id
from . import quire_engine_pb2 as pb
from .calls import Call, Method
from .messages import make_response, parse_message, read_generate_request

_LOOK_S = 1.0  # between two looks of a Watch
_SERVICES = ("", *(service.full_name for service in pb.DESCRIPTOR.services_by_name.values()))
_Response = health_pb2.HealthCheckResponse


_CARD_FIELDS = ("id", "created", "max_model_len")


class EngineService:
    """Knows the requests under way by their callers' ids, each caller's apart from others'."""

    name = pb.DESCRIPTOR.services_by_name["QuireEngine"].full_name

    def __init__(self, models: ServedModels) -> None:
        self._models = models
        self._running: dict[tuple[str, str], tuple[Serving, str]] = {}  # tenant and its id -> its engine's id
        self.methods = {
            "Generate": Method(functools.partial(self._generate, is_stream=False)),
            "GenerateStream": Method(functools.partial(self._generate, is_stream=True)),
            "Abort": Method(self._abort),
            "ListModels": Method(self._list_models),
        }

    async def _generate(self, call: Call, message: bytes, is_stream: bool) -> None:
        """Answers as they come; a request that is not streamed has one."""
        self._models.check_open()
        parsed = parse_message(message, pb.GenerateRequest)
        name = parsed.model if parsed.HasField("model") else None
        serving = self._models.find(name, "generate").serving
        request_id, request = read_generate_request(parsed, serving.llm.facts.max_model_len, is_stream)
        del message, parsed
        admitted = await admit_completion(serving, request, call.caller)
        (engine_input,), prepared = admitted.inputs, admitted.prepared
        del admitted
        with self._enter(serving, call.caller.tenant, request_id) as (shown_id, engine_id):
            outputs = serving.generate(engine_id, engine_input, prepared, call.caller, request)
            del engine_input
            has_prompt_logprobs = False
            async with aclosing(outputs):
                async for output in outputs:
                    make = functools.partial(make_response, shown_id, output, not has_prompt_logprobs)
                    has_prompt_logprobs = has_prompt_logprobs or output.prompt_logprobs is not None
                    await call.write(await make_beside(output, make))

    @contextlib.contextmanager
    def _enter(self, serving: Serving, tenant: str, request_id: str | None) -> Generator[tuple[str, str]]:
        """The caller's id of a request, which is its own for the block, and the engine's."""
        engine_id = make_id("grpc")
        key = tenant, request_id or engine_id
        if key in self._running:
            raise FieldError("request_id", request_id, "an id that no request of yours under way has")
        self._running[key] = serving, engine_id
        note_request_id(key[1])
        try:
            yield key[1], engine_id
        finally:
            del self._running[key]

    async def _abort(self, call: Call, message: bytes) -> None:
        names = parse_message(message, pb.AbortRequest).request_ids
        limit = self._models.parts.options.limits.max_sequences
        if len(names) > limit:
            raise FieldError("request_ids", f"{len(names)} ids", f"at most {limit} (max_sequences)")
        requests = {name: self._running.get((call.caller.tenant, name)) for name in names}
        running = {name: request for name, request in requests.items() if request is not None}
        for serving, engine_id in running.values():
            await serving.llm.abort([engine_id])
        await call.write(pb.AbortResponse(request_ids=running).SerializeToString())

    async def _list_models(self, call: Call, message: bytes) -> None:
        parse_message(message, pb.ListModelsRequest)
        models = self._models
        models.check_open()
        cards = [models.make_card(model) for model in models.models]
        shown = [pb.ModelCard(**{name: card[name] for name in _CARD_FIELDS}) for card in cards]
        await call.write(pb.ListModelsResponse(models=shown).SerializeToString())


class HealthService:
    """Asks the server each time, so that nobody has to tell it of changes.

    Whoever has no key where one is wanted may check the server as a whole: its message is not read.
    """

    name = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name

    def __init__(self, models: ServedModels) -> None:
        self._models = models
        self._closing = asyncio.Event()
        self.methods = {"Check": Method(self._check), "Watch": Method(self._watch)}

    def close(self) -> None:
        """End the Watches, which have no end of their own."""
        self._closing.set()

    async def _check(self, call: Call, message: bytes) -> None:
        service = parse_message(message, health_pb2.HealthCheckRequest).service
        if service not in _SERVICES:
            allowed = ", ".join(map(repr, _SERVICES))
            text = describe_refusal("service", service, f"one of {allowed}")
            raise ApiError(HTTPStatus.NOT_FOUND, text, param="service", code="unknown_service")
        await call.write(_Response(status=self._status).SerializeToString())

    async def _watch(self, call: Call, message: bytes) -> None:
        is_known = parse_message(message, health_pb2.HealthCheckRequest).service in _SERVICES
        written = None
        while True:
            is_last = self._closing.is_set()
            status = self._status if is_known else _Response.SERVICE_UNKNOWN
            if status != written:
                await call.write(_Response(status=status).SerializeToString())
                written = status
            if is_last:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._closing.wait()

    @property
    def _status(self) -> int:
        return _Response.SERVING if self._models.status in WELL else _Response.NOT_SERVING
