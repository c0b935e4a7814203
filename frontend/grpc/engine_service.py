"""QuireEngine, the service of quire_engine.proto: its methods over the models that HTTP's routes serve."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator
from contextlib import aclosing

from ..openai.access.record import note_request_id
from ..openai.endpoints.completions import admit_completion
from ..openai.endpoints.logprobs import make_beside
from ..openai.engines.served_models import ServedModels
from ..openai.errors import FieldError
from ..openai.serving import Serving, make_id
from . import quire_engine_pb2 as pb
from .calls import Call, Method
from .messages import make_response, parse_message, read_generate_request


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
        (given,), prepared = admitted.inputs, admitted.prepared
        del admitted
        with self._enter(serving, call.caller.tenant, request_id) as (shown_id, engine_id):
            outputs = serving.generate(engine_id, given, prepared, call.caller, request)
            del given
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
        found = {name: self._running.get((call.caller.tenant, name)) for name in names}
        running = {name: one for name, one in found.items() if one is not None}
        for serving, engine_id in running.values():
            await serving.llm.abort([engine_id])
        await call.write(pb.AbortResponse(request_ids=running).SerializeToString())

    async def _list_models(self, call: Call, message: bytes) -> None:
        parse_message(message, pb.ListModelsRequest)
        models = self._models
        models.check_open()
        cards = [models.make_card(model) for model in models.models]
        told = [
            pb.ModelCard(id=card.id, created=card.created, max_model_len=card.max_model_len) for card in cards
        ]
        await call.write(pb.ListModelsResponse(models=told).SerializeToString())
