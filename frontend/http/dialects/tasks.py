"""Which routes are for which of a model's tasks, and what is said to who asks for what it cannot do."""

from __future__ import annotations

from http import HTTPStatus

from ....ipc.protocol.messages import EngineFacts
from ..errors import ApiError

_ROUTES = {
    "generate": ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
    "embed": ("/v1/embeddings", "/v2/embed", "/embed", "/similarity"),
    "classify": ("/classify",),
    "score": ("/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score"),
}
_POOLING_ROUTE = "/pooling"  # for all but the first, and the token-wise ones
_TASK_OF_ROUTE = {route: task for task, routes in _ROUTES.items() for route in routes}


def find_task(path: str) -> str | None:
    """The task that a route is for; None: for none, or the body says which."""
    return _TASK_OF_ROUTE.get(path)


def computes(path: str) -> bool:
    """Whether a route has the engine compute something."""
    return path in _TASK_OF_ROUTE or path == _POOLING_ROUTE


def check_task(facts: EngineFacts, task: str) -> None:
    """Raise ApiError 400, which names the routes that there are, unless the model can do this."""
    if task in facts.tasks:
        return
    routes = [route for one in facts.tasks for route in _ROUTES.get(one, ())]
    if facts.tasks != ("generate",):
        routes.append(_POOLING_ROUTE)
    raise ApiError(
        HTTPStatus.BAD_REQUEST,
        f"model={facts.served_model_name!r}: a model that can {task}; this one can "
        f"{', '.join(facts.tasks)}: {', '.join(routes)}",
        param="model",
        code="unsupported_task",
    )
