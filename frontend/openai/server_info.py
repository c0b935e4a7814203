"""/load, /server_info, /tokenizer_info and /ping: what vLLM's servers tell programs of themselves."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from starlette.responses import Response

from ..models.model_files import read_json
from ..text.tokenizer import Tokenizer
from .bodies.openapi import Routes
from .bodies.schema import LoadResponse, ServerInfo, StatusResponse
from .engines.served_models import WELL, ServedModels
from .errors import ErrorResponse, FieldError
from .stream import respond

_SECRETS = ("api_key_hashes", "otlp_traces_endpoint")  # of ServerOptions
_FILES = ("vocab_file", "merges_file", "name_or_path")  # of a tokenizer's settings


def add_routes(routes: Routes, models: ServedModels) -> None:
    """Serve them; /tokenizer_info if the operator wants it."""
    options = models.parts.options

    async def get_load() -> Response:
        return respond(LoadResponse(sum(len(one.room.request_ids) for one in models.servings)))

    async def get_server_info(config_format: str = "text") -> Response:
        if config_format not in ("text", "json"):
            raise FieldError("config_format", config_format, "'text' or 'json'")
        server = msgspec.to_builtins(options)
        facts = {one.model_id: msgspec.to_builtins(one.llm.facts) for one in models.servings}
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

    routes.add("/load", get_load, "How much a server has to do.", LoadResponse)
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
