"""The table of dialects: which routes there are for requests, and which of them a model can answer."""

from __future__ import annotations

from http import HTTPStatus

import msgspec

from ....ipc.protocol.messages import EngineFacts
from ..errors import ApiError, FieldError
from . import chat, cohere, completions, embeddings, messages, ollama, ranks, responses, scores, tei, tokenize
from .route import PostRoute

# In the order in which docs/http.md and /openapi.json show them.
DIALECTS = (chat, completions, responses, messages, ollama, embeddings, cohere, tei, ranks, scores, tokenize)
ROUTES: dict[str, PostRoute] = {route.path: route for dialect in DIALECTS for route in dialect.ROUTES}


def computes(path: str) -> bool:
    """Whether a route has the engine compute something."""
    return path in ROUTES and ROUTES[path].task is not None


def check_request(route: PostRoute, facts: EngineFacts, request: msgspec.Struct) -> None:
    """ApiError 400 for a task that the model cannot do, with what it can; and for a value that is refused."""
    task = route.task(facts, request) if callable(route.task) else route.task
    if task is not None and task not in facts.tasks:
        able = [path for task in facts.tasks for path, other in ROUTES.items() if other.task == task]
        if facts.tasks != ("generate",):
            able.append(embeddings.POOLING_PATH)
        raise ApiError(
            HTTPStatus.BAD_REQUEST,
            f"model={facts.served_model_name!r}: expected a model that can {task}; this one can "
            f"{', '.join(facts.tasks)}: {', '.join(able)}",
            param="model",
            code="unsupported_task",
        )
    for name, (allowed, is_allowed) in route.refused.items():
        value = getattr(request, name)
        if value is not None and not is_allowed(value):
            raise FieldError(name, value, allowed, "unsupported_field")
