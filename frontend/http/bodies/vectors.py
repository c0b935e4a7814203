"""Requests and answers of what a model makes vectors of: embeddings, classes, scores, ranks.

By the names of OpenAI, vLLM, Jina, Cohere and text-embeddings-inference (TEI). Vectors are the worker's bytes
until they are JSON (`pooling/vectors.py`), so the Structs of answers only say what that looks like.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ....ipc.params.param_fields import MAX_INT
from ....ipc.params.pooling_params import PoolingTask
from ....ipc.params.request_options import Priority
from .schema import ChatMessage, SchedulingFields, TokenId, TruncationSide

Texts = str | list[str | int | list[TokenId]]  # a text, texts, token ids, or lists of token ids
Positive = Annotated[int, Meta(ge=1, le=MAX_INT)]
Cuts = Annotated[bool, Meta(description="true: cut texts that are too long; default: refuse them")]
Name = Annotated[str, Meta(max_length=256)]
EncodingFormat = Literal["float", "base64"]
TruncationDirection = Literal["left", "right", "Left", "Right"]

# What is allowed, by a path of a body.
CHOICES_OF_POOLING = {
    "encoding_format": '"float" or "base64"',
    "task": ", ".join(f'"{task}"' for task in get_args(PoolingTask)),
    "truncate": '"NONE", "START" or "END"',
    "truncation_direction": '"left" or "right"',
    "parameters.truncation_direction": '"left" or "right"',
}


class Document(msgspec.Struct, forbid_unknown_fields=True):
    """A text, as some clients wrap it."""

    text: str


DocumentText = str | Document


class PoolingFields(SchedulingFields, kw_only=True, forbid_unknown_fields=True):
    """What any of these requests may say, by vLLM's names; None: it does not say."""

    model: str | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=MAX_INT)] | None = None
    truncation_side: TruncationSide | None = None
    use_activation: bool | None = None


class InputFields(PoolingFields, kw_only=True, forbid_unknown_fields=True):
    """Either texts or a conversation. prompt_name, input_type: which of the model's prompts goes before."""

    input: Texts | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prompt_name: Name | None = None
    input_type: Name | None = None


class EmbeddingRequest(InputFields, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/embeddings."""

    encoding_format: EncodingFormat | None = None
    dimensions: Positive | None = None


class PoolingRequest(InputFields, kw_only=True, forbid_unknown_fields=True):
    """POST /pooling. task: None takes the first that the model can do, as vLLM orders them."""

    task: PoolingTask | None = None
    encoding_format: EncodingFormat | None = None
    dimensions: Positive | None = None


class ClassifyRequest(InputFields, kw_only=True, forbid_unknown_fields=True):
    """POST /classify."""


class ScoreRequest(PoolingFields, kw_only=True, forbid_unknown_fields=True):
    """POST /score: one text with one or with each of many, or pairs."""

    text_1: str | list[DocumentText] | None = None
    text_2: str | list[DocumentText] | None = None
    queries: str | list[DocumentText] | None = None
    documents: str | list[DocumentText] | None = None
    max_tokens_per_doc: Positive | None = None


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

    documents: list[DocumentText] | None = None  # type: ignore[assignment]
    texts: Annotated[list[str], Meta(description="in place of documents; the answer is TEI's")] | None = None
    raw_scores: bool | None = None
    return_text: bool | None = None
    truncate: Cuts | None = None
    truncation_direction: TruncationDirection | None = None


class CohereEmbedRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v2/embed, as Cohere's clients ask."""

    model: str | None = None
    texts: Annotated[list[str], Meta(description="required; what is embedded")] | None = None
    input_type: Name | None = None
    embedding_types: Annotated[list[str], Meta(min_length=1, max_length=8)] | None = None
    truncate: (
        Annotated[
            Literal["NONE", "START", "END"],
            Meta(description="which end of a text that is too long is cut; NONE: refuse it; default END"),
        ]
        | None
    ) = None
    output_dimension: Positive | None = None
    max_tokens: (
        Annotated[Positive, Meta(description="cut each text to so many tokens; default: to what fits")] | None
    ) = None
    priority: Priority | None = None
    images: Any = None
    inputs: Any = None


class TextParameters(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What TEI's clients say of texts."""

    truncate: Cuts | None = None
    truncation_direction: TruncationDirection | None = None
    prompt_name: Name | None = None


class TeiEmbedRequest(TextParameters, kw_only=True, forbid_unknown_fields=True):
    """POST /embed, as TEI's clients ask."""

    inputs: Texts
    normalize: bool | None = None
    dimensions: Positive | None = None
    model: str | None = None


class SimilarityInputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One sentence, and those that it is compared with."""

    source_sentence: str
    sentences: Annotated[list[str], Meta(min_length=1)]


class SimilarityRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /similarity, as TEI's clients ask."""

    inputs: SimilarityInputs
    parameters: TextParameters | None = None
    model: str | None = None


class PoolingUsage(msgspec.Struct):
    """Counts of tokens; nothing is generated."""

    prompt_tokens: int
    total_tokens: int


class ListResponse(msgspec.Struct, kw_only=True):
    """What answers with a list have beside it."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    usage: PoolingUsage


class Embedding(msgspec.Struct, kw_only=True):
    """A vector: its numbers, or base64 of them as float32, little-endian."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingResponse(ListResponse, kw_only=True):
    """Answer of /v1/embeddings."""

    data: list[Embedding]


class Pooled(msgspec.Struct, kw_only=True):
    """What was computed of an input: a vector, one for each token, or base64 as in Embedding."""

    object: Literal["pooling"] = "pooling"
    index: int
    data: list[float | list[float]] | str


class PoolingResponse(ListResponse, kw_only=True):
    """Answer of /pooling."""

    data: list[Pooled]


class Classification(msgspec.Struct, kw_only=True):
    """The likeliest class of an input. label: None if the model does not name its classes."""

    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class ClassifyResponse(ListResponse, kw_only=True):
    """Answer of /classify."""

    data: list[Classification]


class Score(msgspec.Struct, kw_only=True):
    """How well a pair goes together."""

    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreResponse(ListResponse, kw_only=True):
    """Answer of /score."""

    data: list[Score]


class Rank(msgspec.Struct, kw_only=True):
    """A document by its place in the request."""

    index: int
    relevance_score: float
    document: Document | UnsetType = UNSET


class ApiVersion(msgspec.Struct):
    """Of Cohere's API."""

    version: str


class BilledUnits(msgspec.Struct):
    """Cohere's name of a count of tokens."""

    input_tokens: int


class CohereMeta(msgspec.Struct):
    """Where Cohere's clients look for the usage."""

    api_version: ApiVersion
    billed_units: BilledUnits


class RerankResponse(msgspec.Struct, kw_only=True):
    """Answer of /v1/rerank and /v2/rerank: the best document first."""

    id: str
    object: Literal["list"] = "list"
    model: str
    results: list[Rank]
    usage: PoolingUsage
    meta: CohereMeta


class TeiRank(msgspec.Struct, kw_only=True):
    """A text by its place in the request."""

    index: int
    score: float
    text: str | UnsetType = UNSET


class CohereEmbeddings(msgspec.Struct, kw_only=True):
    """Vectors in each form that was asked for."""

    floats: list[list[float]] | UnsetType = msgspec.field(default=UNSET, name="float")
    base64: list[str] | UnsetType = UNSET


class CohereEmbedResponse(msgspec.Struct, kw_only=True):
    """Answer of /v2/embed."""

    id: str
    response_type: Literal["embeddings_by_type"] = "embeddings_by_type"
    embeddings: CohereEmbeddings
    texts: list[str]
    meta: CohereMeta


class ModelInfo(msgspec.Struct, kw_only=True):
    """Answer of /info, by TEI's names."""

    model_id: str
    model_sha: str | None = None
    model_dtype: str
    model_type: dict[str, dict[str, Any]]
    tasks: list[str]
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int
    max_batch_requests: int
    max_client_batch_size: int
    auto_truncate: bool = False
    tokenization_workers: int = 2
    version: str
