"""How well texts go together, by whichever way the model has: /score, and what ranks are made of.

A cross-encoder reads each pair. Of a model that embeds it is the cosine of two vectors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import msgspec
from starlette.responses import Response

from ....ipc.params.pooling_params import FLOAT_BYTES, PoolingParams
from ...requests.vectors.encoder import DOCUMENT_PROMPTS, QUERY_PROMPTS
from ...requests.vectors.scoring import compute_cosine
from ..caller import Caller
from ..errors import FieldError, missing_field
from ..serving import Serving, make_id
from ..stream import JsonResponse
from .route import PostRoute
from .vector_request import (
    DocumentText,
    Inputs,
    PoolingFields,
    Positive,
    VectorRequest,
    ask,
    make_params,
    read_floats,
    read_score,
    read_texts,
    write_list,
)

_CUT = PoolingParams(truncate_prompt_tokens=-1)
_MAX_INLINE_NUMBERS = 4096  # of vectors that are compared in the event loop: 1 ms

_encode = msgspec.json.Encoder().encode


class ScoreRequest(PoolingFields, kw_only=True, forbid_unknown_fields=True):
    """POST /score: one text with one or with each of many, or pairs."""

    text_1: str | list[DocumentText] | None = None
    text_2: str | list[DocumentText] | None = None
    queries: str | list[DocumentText] | None = None
    documents: str | list[DocumentText] | None = None
    max_tokens_per_doc: Positive | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """First texts, one for all or as many as there are second ones; and what the request calls each."""

    firsts: Sequence[str]
    first_names: Sequence[str]
    seconds: Sequence[str]
    second_names: Sequence[str]


@dataclass(frozen=True, slots=True)
class Scores:
    """One a pair, and the tokens of all."""

    values: list[float]
    num_tokens: int


async def create_score(serving: Serving, request: ScoreRequest, caller: Caller) -> Response:
    """Score one text with one or with each of many, or pairs. Raises InputErrors and ApiErrors."""
    answer_id = make_id("score")
    pairs = _read_pairs(request, serving.options.limits.max_inputs)
    scores = await score(serving, caller, request, pairs, answer_id)
    items = (
        _encode({"index": index, "object": "score", "score": value})
        for index, value in enumerate(scores.values)
    )
    model = serving.find_name(request.model)
    return JsonResponse(write_list(answer_id, model, items, scores.num_tokens), answer_id)


def _read_pairs(request: ScoreRequest, max_inputs: int) -> Pairs:
    first, firsts = _choose("text_1", request.text_1, "queries", request.queries)
    second, seconds = _choose("text_2", request.text_2, "documents", request.documents)
    first_texts, first_names = read_texts(first, firsts, max_inputs)
    second_texts, second_names = read_texts(second, seconds, max_inputs)
    if len(first_texts) not in (1, len(second_texts)):
        allowed = f"one, or as many as {second} ({len(second_texts)})"
        raise FieldError(first, f"a list of {len(first_texts)}", allowed)
    return Pairs(firsts=first_texts, first_names=first_names, seconds=second_texts, second_names=second_names)


_Given = str | list[DocumentText]


def _choose(name: str, value: _Given | None, other: str, other_value: _Given | None) -> tuple[str, _Given]:
    """The one that is given, of two names for the same."""
    if value is None and other_value is None:
        raise missing_field(name, f"a text or texts; or {other!r} instead")
    if value is not None and other_value is not None:
        raise FieldError(name, value, f"either {name!r} or {other!r}, which mean the same")
    return (name, value) if value is not None else (other, other_value or "")


async def score(
    serving: Serving,
    caller: Caller,
    fields: Any,
    pairs: Pairs,
    answer_id: str,
    *,
    cuts_seconds: bool = False,
    **param_fields: tuple[str, Any],
) -> Scores:
    """The score of each pair. `fields`: the request; `own`: as make_params has them.

    cuts_seconds: second texts that are too long are cut where the request does not say how.
    """
    for name, text in zip(pairs.first_names, pairs.firsts, strict=True):
        if not text:
            raise FieldError(name, text, "a text that is not empty")
    most, processor = getattr(fields, "max_tokens_per_doc", None), serving.llm.pooling.processor
    if processor.scores_pairs:
        if cuts_seconds and fields.truncate_prompt_tokens is None:  # of a pair the second text alone is cut
            param_fields["truncate_prompt_tokens"] = "truncate_prompt_tokens", -1
        params = make_params(serving, fields, "classify", **param_fields)
        inputs = Inputs(pairs.seconds, pairs.second_names, "", pairs.firsts, max_tokens_per_text=most)
        vectors = await ask(serving, caller, VectorRequest(answer_id, inputs, params, fields))
        return Scores([read_score(vector) for vector in vectors.data], vectors.num_tokens)
    params = make_params(serving, fields, "embed", **param_fields)
    texts = serving.model_texts
    prompted = _put_before(texts.find_named_prompt(QUERY_PROMPTS), pairs.firsts)
    prompted += _put_before(texts.find_named_prompt(DOCUMENT_PROMPTS), pairs.seconds)
    names = [*pairs.first_names, *pairs.second_names]
    num_queries = len(pairs.firsts)
    cut = processor.find_truncation(_CUT) if cuts_seconds else None
    inputs = Inputs(prompted, names, num_queries=num_queries, max_tokens_per_text=most, truncation=cut)
    vectors = await ask(serving, caller, VectorRequest(answer_id, inputs, params, fields))
    values = await compare(vectors.data[:num_queries], vectors.data[num_queries:])
    return Scores(values, vectors.num_tokens)


def _put_before(prompt: str, texts: Sequence[str]) -> list[str]:
    """The prompt before each text that is not empty, which is refused."""
    return [prompt + text if text else text for text in texts]


async def compare(firsts: list[bytes], seconds: list[bytes]) -> list[float]:
    """The cosine of each pair of vectors; the only one of `firsts` goes with each of `seconds`."""
    is_short = sum(map(len, seconds)) <= _MAX_INLINE_NUMBERS * FLOAT_BYTES
    return _compare(firsts, seconds) if is_short else await asyncio.to_thread(_compare, firsts, seconds)


def _compare(firsts: list[bytes], seconds: list[bytes]) -> list[float]:
    first_vectors = map(read_floats, firsts) if len(firsts) > 1 else repeat(read_floats(firsts[0]))
    return list(map(compute_cosine, first_vectors, map(read_floats, seconds)))


ROUTES = [PostRoute(path, ScoreRequest, create_score, task="score") for path in ("/score", "/v1/score")]
