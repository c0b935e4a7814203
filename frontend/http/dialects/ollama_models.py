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
_PARAMETERS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_SIZES = {"embedding_length": "hidden_size", "block_count": "num_hidden_layers"}  # as config.json has them


def add_routes(routes: Routes, models: ServedModels) -> None:
    """Serve those that name no model, and those that are refused."""
    modified_at = datetime.fromtimestamp(models.parts.created, UTC)

    async def get_ollama_version() -> Response:
        return respond({"version": _API_VERSION})

    async def list_ollama_models() -> Response:
        models.check_open()
        rows = [_describe(model, name) for model in models.models for name in model.names]
        return respond({"models": [row | {"modified_at": modified_at} for row in rows]})

    async def list_ollama_processes() -> Response:
        models.check_open()
        return respond({"models": [_describe(model, model.name) for model in models.models if model.is_here]})

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
    facts, tokenizer, output_format = serving.llm.facts, serving.llm.tokenizer, serving.output_format
    config, details = _read_config(facts.tokenizer), _describe_details(facts)
    family = details["family"]
    info: Json = {"general.architecture": family, "general.basename": request.model}
    info |= {
        f"{family}.{name}": config[key] for name, key in _SIZES.items() if isinstance(config.get(key), int)
    }
    chosen = {
        name: serving.default_sampling[name] for name in _PARAMETERS if name in serving.default_sampling
    }
    parameters = {"num_ctx": facts.max_model_len, **chosen}
    able = {
        "completion": "generate" in facts.tasks,
        "tools": output_format is not None and output_format.calls is not None,
        "thinking": serving.is_thinking,
        "embedding": "embed" in facts.tasks,
    }
    return respond(
        {
            "modelfile": f"FROM {request.model}\n",
            "parameters": "\n".join(f"{name:<30} {value}" for name, value in parameters.items()),
            "template": "" if tokenizer is None else tokenizer.template_source,
            "details": details,
            "model_info": info | {f"{family}.context_length": facts.max_model_len},
            "capabilities": [name for name, is_able in able.items() if is_able],
            "modified_at": datetime.fromtimestamp(facts.started_at, UTC),
        }
    )


async def pull_ollama_model(_serving: Serving, _body: body.OllamaModelRequest, _caller: Caller) -> Response:
    """Say that a model is here, as every one that is served; others are refused as unknown."""
    return respond({"status": "success"})


def _describe(model: ServedModel, name: str) -> Json:
    """A model under one of its names, which Ollama's clients look for with a tag."""
    tagged = name if ":" in name.rpartition("/")[2] else f"{name}:latest"
    facts = model.serving.llm.facts if model.is_here else model.facts
    # Wherever the files lie.
    identity = "\n".join((Path(facts.model).name, Path(facts.weight_file).name, facts.formats))
    size, on_gpu = 0, False
    if isinstance(facts, EngineFacts):
        size, on_gpu = dict(facts.ledger).get("weights", 0), facts.device.startswith("cuda")
    return {
        "name": tagged,
        "model": tagged,
        "size": size,
        "size_vram": size * on_gpu,
        "digest": sha256(identity.encode()).hexdigest(),  # not of the files themselves
        "details": _describe_details(facts),
        "context_length": facts.max_model_len,
        "expires_at": _FOREVER,
    }


def _describe_details(facts: EngineFacts | DaemonModel) -> Json:
    """parameter_size: it is not known how many there are."""
    config = _read_config(facts.tokenizer) if isinstance(facts, EngineFacts) else {}
    family = str(config.get("model_type", "unknown"))
    form = "gguf" if facts.weight_file else "safetensors"
    details = {"parent_model": "", "format": form, "family": family, "families": [family]}
    return details | {"parameter_size": "", "quantization_level": facts.formats}


@functools.lru_cache(16)
def _read_config(folder: str) -> Json:
    """config.json beside the tokenizer; {} where it cannot be read."""
    with contextlib.suppress(ModelError):
        return read_json(Path(folder) / "config.json")
    return {}


MODEL_ROUTES = [
    PostRoute("/api/show", body.OllamaModelRequest, show_ollama_model),
    PostRoute("/api/pull", body.OllamaModelRequest, pull_ollama_model),
]
