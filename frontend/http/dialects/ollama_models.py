"""What Ollama's clients ask of models: /api/tags, /api/ps, /api/show, /api/version, /api/pull.

Which models there are is the operator's to say: what would change it is refused, and only what is here can be
pulled.
"""

from __future__ import annotations

import contextlib
import functools
from datetime import UTC, datetime
from hashlib import sha256
from http import HTTPStatus
from pathlib import Path

from starlette.responses import Response

from ....ipc.errors import ModelError
from ....ipc.protocol.messages import EngineFacts
from ...models.model_files import read_json
from ..bodies.openapi import Routes
from ..caller import Caller
from ..engines.daemon_model import DaemonModel
from ..engines.served_models import ServedModel, ServedModels
from ..errors import ApiError
from ..serving import Serving
from ..stream import Json, respond
from . import ollama_body as body
from .route import PostRoute

_API_VERSION = "0.33.0"  # of Ollama, whose API this is: clients ask for a least one
_FOREVER = "2300-01-01T00:00:00Z"
_PARAMETERS = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
_PARAMETERS["repetition_penalty"] = "repeat_penalty"


def format_time(timestamp: float) -> str:
    """RFC 3339."""
    return f"{datetime.fromtimestamp(timestamp, UTC):%Y-%m-%dT%H:%M:%S.%fZ}"


def add_routes(routes: Routes, models: ServedModels) -> None:
    """Serve those that name no model, and those that are refused."""

    async def get_ollama_version() -> Response:
        return respond({"version": _API_VERSION})

    async def list_ollama_models() -> Response:
        models.check_open()
        modified_at = format_time(models.parts.created)
        rows = [_describe(model, name) for model in models.models for name in model.names]
        return respond({"models": [row | {"modified_at": modified_at} for row in rows]})

    async def list_ollama_processes() -> Response:
        models.check_open()
        return respond({"models": [_describe_loaded(model) for model in models.models if model.is_here]})

    async def refuse_change() -> Response:
        text = "the models of this server are its operator's to choose: quire serve MODEL, or quire daemon"
        raise ApiError(HTTPStatus.FORBIDDEN, text, code="not_allowed")

    routes.add("/api/version", get_ollama_version, "The version of Ollama whose API this is.")
    routes.add("/api/tags", list_ollama_models, "What is served, for Ollama's clients.")
    routes.add("/api/ps", list_ollama_processes, "What is loaded, for Ollama's clients.")
    for name in ("create", "copy", "push", "delete"):
        routes.add_page(f"/api/{name}", refuse_change, "DELETE" if name == "delete" else "POST")


async def show_ollama_model(serving: Serving, request: body.OllamaModelRequest, _caller: Caller) -> Response:
    """What a model is and can do, for Ollama's clients."""
    facts, tokenizer = serving.llm.facts, serving.llm.tokenizer
    config, family = _read_config(facts.model, facts.tokenizer), _read_family(facts)
    info: Json = {"general.architecture": family, "general.basename": request.model}
    info[f"{family}.context_length"] = facts.max_model_len
    for key, name in (("embedding_length", "hidden_size"), ("block_count", "num_hidden_layers")):
        if isinstance(config.get(name), int):
            info[f"{family}.{key}"] = config[name]
    parameters = {"num_ctx": facts.max_model_len} | {
        _PARAMETERS[name]: value for name, value in serving.default_sampling.items() if name in _PARAMETERS
    }
    return respond(
        {
            "modelfile": f"FROM {request.model}\n",
            "parameters": "\n".join(f"{name:<30} {value}" for name, value in parameters.items()),
            "template": "" if tokenizer is None else tokenizer.template_source,
            "details": _describe_details(facts),
            "model_info": info,
            "capabilities": _list_capabilities(serving),
            "modified_at": format_time(facts.started_at),
        }
    )


async def pull_ollama_model(_serving: Serving, _body: body.OllamaModelRequest, _caller: Caller) -> Response:
    """Say that a model is here, as every one that is served; others are refused as unknown."""
    return respond({"status": "success"})


def _describe(model: ServedModel, name: str) -> Json:
    """A model under one of its names, which Ollama's clients look for with a tag."""
    tagged = name if ":" in name.rpartition("/")[2] else f"{name}:latest"
    facts = model.facts
    identity = "\n".join((facts.model, facts.weight_file, facts.formats))
    return {
        "name": tagged,
        "model": tagged,
        "size": dict(facts.ledger).get("weights", 0) if isinstance(facts, EngineFacts) else 0,
        "digest": sha256(identity.encode()).hexdigest(),  # of what is served, not of its files
        "details": _describe_details(facts),
    }


def _describe_loaded(model: ServedModel) -> Json:
    facts = model.serving.llm.facts
    row = _describe(model, model.name)
    size_vram = row["size"] if facts.device.startswith("cuda") else 0
    return row | {"expires_at": _FOREVER, "size_vram": size_vram, "context_length": facts.max_model_len}


def _describe_details(facts: EngineFacts | DaemonModel) -> Json:
    """parameter_size: it is not known how many there are."""
    family = _read_family(facts)
    return {
        "parent_model": "",
        "format": "gguf" if facts.weight_file else "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": facts.formats,
    }


def _list_capabilities(serving: Serving) -> list[str]:
    facts, output_format = serving.llm.facts, serving.output_format
    able = {
        "completion": "generate" in facts.tasks,
        "tools": output_format is not None and output_format.calls is not None,
        "thinking": serving.is_thinking,
        "embedding": "embed" in facts.tasks,
    }
    return [name for name, is_able in able.items() if is_able]


def _read_family(facts: EngineFacts | DaemonModel) -> str:
    return str(_read_config(facts.model, getattr(facts, "tokenizer", "")).get("model_type", "unknown"))


@functools.lru_cache(16)
def _read_config(*folders: str) -> Json:
    """config.json of the first of the folders that has one; {} where none can be read."""
    for folder in folders:
        with contextlib.suppress(ModelError):
            if config := read_json(Path(folder) / "config.json"):
                return config
    return {}


MODEL_ROUTES = [
    PostRoute("/api/show", body.OllamaModelRequest, show_ollama_model),
    PostRoute("/api/pull", body.OllamaModelRequest, pull_ollama_model),
]
