"""What a loaded model can be asked, and the error for what it cannot."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ....ipc.errors import PoolingParamsError
from ....ipc.params.pooling_params import PoolingParams, PoolingTask, describe_bad_dimensions
from ....ipc.protocol.messages import EngineFacts

# Task -> the call of LLM that does it.
_CALLS = {
    "generate": "LLM.generate",
    "embed": "LLM.embed",
    "classify": "LLM.classify",
    "score": "LLM.score",
    "token_embed": "LLM.encode(pooling_task='token_embed')",
    "token_classify": "LLM.encode(pooling_task='token_classify')",
}
_CONVERTS = {"embed": "embed", "token_embed": "embed", "classify": "classify", "token_classify": "classify"}


def describe_tasks(facts: EngineFacts) -> str:
    """What the model does, each with the call for it."""
    return ", ".join(f"{task} ({_CALLS[task]})" for task in facts.tasks if task in _CALLS)


def check_task(facts: EngineFacts, task: str) -> None:
    """Raise PoolingParamsError, which says what the model does, if it does not do `task`."""
    if task in facts.tasks:
        return
    allowed = f"one of what this model does: {describe_tasks(facts)}"
    convert = _CONVERTS.get(task)
    if convert is not None and facts.tasks == ("generate",) and _can_convert(facts, convert):
        allowed = f"{allowed}; started with runner='generate', convert={convert!r} it does this too"
    raise PoolingParamsError("task", task, allowed)


def _can_convert(facts: EngineFacts, convert: str) -> bool:
    from ...models.pooling_head import has_score_tokens

    return convert == "embed" or has_score_tokens(Path(facts.model))


def check_params(facts: EngineFacts, params: PoolingParams | None, task: PoolingTask | None) -> PoolingParams:
    """The parameters with their task, which is the call's, or theirs if the call has none ("embed" at last).

    Raises PoolingParamsError for what the model cannot do.
    """
    requested = PoolingParams() if params is None else params
    if not isinstance(requested, PoolingParams):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PoolingParamsError("pooling_params", requested, "a PoolingParams")
    if task is not None and requested.task not in (None, task):
        raise PoolingParamsError("task", requested.task, f"absent or {task!r}, which is the call's")
    checked = (
        requested if requested.task is not None else msgspec.structs.replace(requested, task=task or "embed")
    )
    assert checked.task is not None
    check_task(facts, checked.task)
    allowed = describe_bad_dimensions(
        checked.dimensions, facts.embedding_size, facts.is_matryoshka, facts.matryoshka_dimensions
    )
    if allowed is not None:
        raise PoolingParamsError("dimensions", checked.dimensions, allowed)
    return checked
