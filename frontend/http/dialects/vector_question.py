"""Question: what one HTTP request asks the engine to make vectors of, and `ask`, the one way there.

Knows neither the bodies that it was read from nor the answers that its vectors become.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from ....ipc.errors import PoolingParamsError, RequestFailedError
from ....ipc.params.pooling_params import PoolingParams, PoolingTask
from ....ipc.protocol.messages import EngineFacts
from ..errors import ApiError
from ..room import Stay
from ..serving import Caller, Serving
from .inputs import Inputs
from .tokenizing import tokenize_inputs
from .vectors import Format, find_price

_INPUTS_A_PLACE = 16  # a vector takes one step, where a text takes one a token
_KNOWN_PARAMS = 64  # of earlier requests: most requests ask for the same
_OF_PARAMS = ("dimensions", "use_activation", "truncate_prompt_tokens", "truncation_side")
_OF_REQUESTS = ("priority", "timeout_s", "queue_timeout_s")


@dataclass(frozen=True, slots=True)
class Question:
    """`fields`: the request, of which priority and the like count. form: of the answer."""

    answer_id: str
    inputs: Inputs
    params: PoolingParams
    fields: Any
    form: Format = "float"


@dataclass(frozen=True, slots=True)
class Vectors:
    """What was made of each input, and how many tokens they had together."""

    data: list[bytes]
    num_tokens: int


def make_params(serving: Serving, fields: Any, task: PoolingTask, **own: tuple[str, Any]) -> PoolingParams:
    """The checked parameters of a request. `own`: by field, what the request calls it and its value there.

    Raises PoolingParamsError, in the request's words.
    """
    found = {field: (field, getattr(fields, field, None)) for field in _OF_PARAMS} | own
    given = tuple((field, value) for field, (_, value) in found.items() if value is not None)
    try:
        return serving.llm.pooling.processor.check_params(_make_params(task, given), task)
    except PoolingParamsError as error:
        name, value = found.get(error.field, (error.field, error.value))
        raise PoolingParamsError(name, value, error.allowed) from None


@functools.lru_cache(_KNOWN_PARAMS)
def _make_params(task: PoolingTask, given: tuple[tuple[str, Any], ...]) -> PoolingParams:
    return PoolingParams(task=task, **dict(given))


async def ask(serving: Serving, caller: Caller, question: Question) -> Vectors:
    """The engine's answer. Raises InputErrors and ApiErrors; the first input that fails ends the others."""
    stay = _find_stay(serving, caller, question)
    inputs, fields, answer_id = question.inputs, question.fields, question.answer_id
    options = {name: getattr(fields, name, None) for name in _OF_REQUESTS}
    serving.room.enter(answer_id, stay)  # before it waits for its token ids: others look for room meanwhile
    try:
        prompts = await tokenize_inputs(serving, caller, inputs, question.params)
        serving.check_open()
        outputs = await serving.llm.pooling.encode_many(
            prompts,
            question.params,
            answer_id,
            fields=inputs.names,
            prompt=inputs.prompt,
            cache_salt=caller.salt(getattr(fields, "cache_salt", None)) or "",
            tenant=caller.tenant,
            names=[name for name in (answer_id, caller.request_id) if name],
            **{name: value for name, value in options.items() if value is not None},
        )
    except RequestFailedError as error:
        raise _explain(error) from None
    finally:
        serving.room.leave(answer_id)
    serving.note_pooled(answer_id, question.params, outputs)
    num_tokens = sum(len(one.prompt_token_ids) for one in outputs)
    return Vectors([one.outputs.raw for one in outputs], num_tokens)


def _explain(error: RequestFailedError) -> Exception:
    """A 408 for what was aborted or out of time, which another try does not help."""
    if error.code is not None:
        return error
    headers = {"x-should-retry": "false"}
    return ApiError(HTTPStatus.REQUEST_TIMEOUT, str(error), code="aborted", headers=headers)


def find_width(facts: EngineFacts, params: PoolingParams) -> int:
    """Numbers of a vector, or of a classifier's answer."""
    return params.dimensions or facts.embedding_size or facts.num_labels or 1


def _find_stay(serving: Serving, caller: Caller, question: Question) -> Stay:
    """What the request takes, for which there is room now; else ApiError 413 or 429."""
    facts, limits, given = serving.llm.facts, serving.options.limits, question.inputs.given
    num_vectors = len(given)
    if question.params.is_token_wise:  # a text has about as many tokens as characters, or fewer
        num_vectors = sum(min(len(one), facts.max_model_len) for one in given)
    price = find_price(num_vectors * find_width(facts, question.params), question.form)
    if price > limits.max_result_bytes:
        raise ApiError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"the answer may come to {price} bytes and may have {limits.max_result_bytes} "
            "(max_result_bytes): ask for fewer inputs, or for base64",
            code="answer_too_large",
        )
    stay = Stay(caller.tenant, -(-len(given) // _INPUTS_A_PLACE), price)
    serving.room.check(stay, serving.max_sequences)
    return stay
