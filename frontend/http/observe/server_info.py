"""What a server tells of itself. /live, /ready and /health: whether the process answers, whether requests are
taken, whether they get on; /load, /server_info, /tokenizer_info and /ping, as vLLM's servers tell programs.

/health asks the engine, at most once at a time however many ask, and waits for it no longer than ANSWER_S.
Of several engines /ready and /health say how each is. They are 200 as long as one is well: a probe of the
server shall not end it for an engine that is away. `?model=NAME` asks about that one.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Coroutine
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ....ipc.errors import QuireError
from ....ipc.protocol.engine_views import Owns, SchedulerStats
from ...models.model_files import read_json
from ...text.tokenizer import Tokenizer
from ..bodies.openapi import Routes
from ..bodies.schema import HealthResponse, ServerInfo, StatusResponse
from ..caller import Caller
from ..engines.served_models import WELL, ServedModel, ServedModels, sum_up
from ..errors import ErrorResponse, FieldError
from ..stream import respond

_SECRETS = ("api_key_hashes", "otlp_traces_endpoint", "server_id")  # of ServerOptions
_FILES = ("vocab_file", "merges_file", "name_or_path")  # of a tokenizer's settings
ANSWER_S = 5.0  # beyond it an engine that has not answered is unhealthy


class EngineCheck:
    """Whether an engine's accepted requests get tokens."""

    def __init__(
        self,
        ask: Callable[[], Coroutine[Any, Any, SchedulerStats]],
        stall_s: float,
        answer_s: float = ANSWER_S,
    ) -> None:
        """`stall_s`: how long a request may have no token while the device is free; 0: for ever."""
        self._ask = ask
        self._stall_s = stall_s
        self._answer_s = answer_s
        self._look: asyncio.Task[SchedulerStats] | None = None
        self._asked_at = 0.0

    async def find_problem(self, owns: Owns) -> HealthResponse | None:
        """None if all is well. An engine that does not answer is a problem. `owns`: of who asks."""
        if self._stall_s == 0:
            return None
        if self._look is None or self._look.done():
            self._look, self._asked_at = asyncio.create_task(self._ask()), time.monotonic()
        look = self._look
        await asyncio.wait({look}, timeout=self._answer_s)
        if not look.done():
            return HealthResponse("unresponsive", for_s=round(time.monotonic() - self._asked_at, 3))
        if isinstance(look.exception(), QuireError):
            return HealthResponse("unresponsive", stage=str(look.exception()))
        stall = look.result().stall
        if stall is None or stall.free_s < self._stall_s:
            return None
        request_id = stall.request_id if owns(stall.owner) else ""
        return HealthResponse("stalled", request_id, stall.stage, round(stall.free_s, 3))


def add_health_routes(routes: Routes, models: ServedModels, find_caller: Callable[[Request], Caller]) -> None:
    """Serve the first three. Which request stalls its own caller is told."""
    stall_s = models.parts.options.stall_s
    checks = {model: EngineCheck(functools.partial(_ask, model), stall_s) for model in models.models}

    async def look(model: ServedModel, caller: Caller) -> HealthResponse:
        status = model.status
        problem = await checks[model].find_problem(caller.owns) if status == "ready" else None
        return problem or HealthResponse(status, stage=model.away_because)

    async def live() -> Response:
        return respond(StatusResponse("live"))

    async def ready(model: str | None = None) -> Response:
        if model is not None:
            body = StatusResponse(models.find(model).status)
        elif models.has_several:
            body = StatusResponse(models.status, {served.name: served.status for served in models.models})
        else:
            body = StatusResponse(models.status)
        return respond(body, status=200 if body.status in WELL else 503)

    async def health(http: Request, model: str | None = None) -> Response:
        caller = find_caller(http)
        if model is not None or not models.has_several:
            body = await look(models.find(model), caller)
        else:
            healths = await asyncio.gather(*(look(served, caller) for served in models.models))
            each = {served.name: body for served, body in zip(models.models, healths, strict=True)}
            body = HealthResponse(sum_up(each.status for each in healths), models=each)
        return respond(body, status=200 if body.status in WELL else 503)

    routes.add("/live", live, "The process answers.", StatusResponse, name="live")
    text = "New requests are taken; 503 while they are not."
    routes.add(
        "/ready", ready, text, StatusResponse, name="ready", more={404: ErrorResponse, 503: StatusResponse}
    )
    text = "As /ready, and those taken get on; 503 with the request that does not, and its stage."
    routes.add(
        "/health", health, text, HealthResponse, name="health", more={404: ErrorResponse, 503: HealthResponse}
    )


async def _ask(model: ServedModel) -> SchedulerStats:
    return await model.serving.llm.stats()


def add_info_routes(routes: Routes, models: ServedModels) -> None:
    """Serve the others; /tokenizer_info if the operator wants it."""
    options = models.parts.options

    async def get_load() -> Response:
        return respond({"server_load": sum(len(served.capacity.request_ids) for served in models.servings)})

    async def get_server_info(config_format: str = "text") -> Response:
        if config_format not in ("text", "json"):
            raise FieldError("config_format", config_format, "'text' or 'json'")
        server = msgspec.to_builtins(options)
        facts = {served.model_id: msgspec.to_builtins(served.llm.facts) for served in models.servings}
        config = {
            "server": {name: value for name, value in server.items() if name not in _SECRETS},
            "models": facts,
        }
        text = msgspec.json.encode(config).decode()
        return respond(
            ServerInfo(config if config_format == "json" else text, _read_env(), _describe_system())
        )

    async def get_tokenizer_info(model: str | None = None) -> Response:
        serving = models.find(model, "generate").serving
        tokenizer, folder = serving.tokenizer, Path(serving.llm.facts.tokenizer)
        info = await asyncio.to_thread(read_tokenizer_info, tokenizer, folder)
        return Response(json.dumps(info), media_type="application/json")

    async def ping() -> Response:
        return respond(StatusResponse(models.status), status=200 if models.status in WELL else 503)

    routes.add("/load", get_load, "How much a server has to do.")
    text = "What a server was started with."
    routes.add("/server_info", get_server_info, text, ServerInfo, more={400: ErrorResponse})
    routes.add("/ping", ping, "As /ready, by SageMaker's name.", StatusResponse, more={503: StatusResponse})
    if options.enable_tokenizer_info_endpoint:
        text = "The tokenizer's settings and the chat template."
        routes.add("/tokenizer_info", get_tokenizer_info, text, dict[str, Any], more={404: ErrorResponse})


def read_tokenizer_info(tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
    """tokenizer_config.json without names of files, special tokens as texts. Raises ModelError."""
    config = {name: _show(value) for name, value in read_json(folder / "tokenizer_config.json").items()}
    for name in _FILES:
        config.pop(name, None)
    if tokenizer.has_chat_template:
        config["chat_template"] = tokenizer.template_source
    if not isinstance(config.get("tokenizer_class"), str):
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    return config


def _show(value: Any) -> Any:
    """A token's text in place of its object."""
    is_token = isinstance(value, dict) and isinstance(value.get("content"), str)  # pyright: ignore[reportUnknownMemberType]
    return value["content"] if is_token else value


def _read_env() -> dict[str, str]:
    return {
        name: value for name, value in os.environ.items() if name.startswith("QUIRE_") and "KEY" not in name
    }


def _describe_system() -> dict[str, str]:
    return {
        "quire_version": version("quire"),
        "python_version": sys.version,
        "python_platform": platform.platform(),
        "cpu_count": str(os.cpu_count()),
    }
