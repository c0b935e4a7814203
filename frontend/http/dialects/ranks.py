"""POST /rerank, /v1/rerank and /v2/rerank: documents by how well they go with a query, the best first.

As Jina, Cohere and vLLM have it. What TEI has at /rerank is told apart by its field `texts`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta
from starlette.responses import Response

from ..caller import Caller
from ..errors import FieldError, missing_field
from ..serving import Serving, make_id
from ..stream import Json, JsonResponse, respond
from .route import PostRoute, Refused, is_off
from .scores import Pairs, Scores, score
from .tei import find_truncation
from .vector_request import (
    Cuts,
    DocumentText,
    PoolingFields,
    Positive,
    TruncationDirection,
    make_meta,
    make_usage,
    read_texts,
)

_TEI_FIELDS = ("raw_scores", "return_text", "truncate", "truncation_direction")
_OTHER_FIELDS = ("documents", "return_documents", "max_tokens_per_doc")


class RankFields(PoolingFields, kw_only=True, forbid_unknown_fields=True):
    """What Jina's, Cohere's and vLLM's clients ask for."""

    query: str
    documents: list[DocumentText]
    top_n: Positive | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Positive | None = None
    rank_fields: list[str] | None = None
    max_chunks_per_doc: Positive | None = None  # it says nothing: a document is not split
    relevant_spans: Any = None


class RerankRequest(RankFields, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/rerank and /v2/rerank."""


class AnyRerankRequest(RankFields, kw_only=True, forbid_unknown_fields=True):
    """POST /rerank: as Jina and Cohere have it with `documents`, as TEI has it with `texts`."""

    CHOICES: ClassVar = {"truncation_direction": '"left" or "right"'}
    documents: list[DocumentText] | None = None  # type: ignore[assignment]
    texts: Annotated[list[str], Meta(description="in place of documents; the answer is TEI's")] | None = None
    raw_scores: bool | None = None
    return_text: bool | None = None
    truncate: Cuts | None = None
    truncation_direction: TruncationDirection | None = None


async def create_rerank(serving: Serving, request: RerankRequest, caller: Caller) -> Response:
    """Rank documents, each with its text unless return_documents is false."""
    return await _rank(serving, request, caller, request.documents, request.return_documents is not False)


async def create_cohere_rerank(serving: Serving, request: RerankRequest, caller: Caller) -> Response:
    """Rank documents, as Cohere's second version does: without their texts, and too long ones are cut."""
    shows = bool(request.return_documents)
    return await _rank(serving, request, caller, request.documents, shows, cuts_documents=True)


async def create_any_rerank(serving: Serving, request: AnyRerankRequest, caller: Caller) -> Response:
    """Rank documents (Jina, Cohere) or texts (text-embeddings-inference)."""
    if request.texts is not None:
        _refuse(request, _OTHER_FIELDS, "only without 'texts'")
        return await _rank_texts(serving, request, caller, request.texts)
    if request.documents is None:
        raise missing_field("documents", "or 'texts', as TEI's clients have it")
    _refuse(request, _TEI_FIELDS, "only with 'texts'")
    return await _rank(serving, request, caller, request.documents, request.return_documents is not False)


def _refuse(request: AnyRerankRequest, names: tuple[str, ...], allowed: str) -> None:
    for name in names:
        if getattr(request, name) is not None:
            raise FieldError(name, getattr(request, name), allowed)


async def _rank(
    serving: Serving,
    request: RankFields,
    caller: Caller,
    documents: list[DocumentText],
    shows_texts: bool,
    *,
    cuts_documents: bool = False,
) -> Response:
    answer_id = make_id("rerank")
    pairs = _make_pairs(serving, request.query, "documents", documents)
    scores = await score(serving, caller, request, pairs, answer_id, cuts_seconds=cuts_documents)
    results: list[Json] = [
        {"index": place, "relevance_score": scores.values[place]}
        | ({"document": {"text": pairs.seconds[place]}} if shows_texts else {})
        for place in _order(scores)[: request.top_n]
    ]
    model = serving.find_name(request.model)
    body: Json = {"id": answer_id, "object": "list", "model": model, "results": results}
    body |= {"usage": make_usage(scores.num_tokens), "meta": make_meta(scores.num_tokens)}
    return respond(body, answer_id)


async def _rank_texts(
    serving: Serving, request: AnyRerankRequest, caller: Caller, texts: list[str]
) -> Response:
    answer_id = make_id("rerank")
    pairs = _make_pairs(serving, request.query, "texts", list(texts))
    param_fields = find_truncation(request.truncate, request.truncation_direction)
    if request.raw_scores:
        param_fields["use_activation"] = "raw_scores", False
    scores = await score(serving, caller, request, pairs, answer_id, cuts_seconds=False, **param_fields)
    ranks: list[Json] = [
        {"index": place, "score": scores.values[place]}
        | ({"text": texts[place]} if request.return_text else {})
        for place in _order(scores)[: request.top_n]
    ]
    return JsonResponse(msgspec.json.encode(ranks), answer_id)


def _make_pairs(serving: Serving, query: str, field: str, documents: list[DocumentText]) -> Pairs:
    texts, names = read_texts(field, documents, serving.options.limits.max_inputs)
    return Pairs(firsts=[query], first_names=["query"], seconds=texts, second_names=names)


def _order(scores: Scores) -> list[int]:
    """Places, the best first; equal ones in the order of the request."""
    return sorted(range(len(scores.values)), key=lambda place: -scores.values[place])


_REFUSED: Refused = {
    "rank_fields": ("['text']: documents are texts", lambda value: value in ([], ["text"])),
    "relevant_spans": ("none: which part of a document is relevant is not told", is_off),
}
ROUTES = [
    PostRoute(path, kind, handler, task="score", refused=_REFUSED)
    for path, kind, handler in (
        ("/rerank", AnyRerankRequest, create_any_rerank),
        ("/v1/rerank", RerankRequest, create_rerank),
        ("/v2/rerank", RerankRequest, create_cohere_rerank),
    )
]
